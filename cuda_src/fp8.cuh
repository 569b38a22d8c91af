// 8-bit floats with one scale, a power of two, for each KV head. Twin of kvrt/kvstore/codecs/fp8.py.
#pragma once
#include "codec.cuh"

enum Fp8Kind { E4M3 = 0, E5M2 = 1 };

// The code nearest to x, ties to even, saturating; a NaN is 0.
KVRT_INLINE u32 round_fp8(float x, int kind) {
  const u32 bits = __float_as_uint(x), size = bits & 0x7FFFFFFFu;
  const int dropped = kind == E4M3 ? 20 : 21;  // bits of the mantissa
  const u32 bias = kind == E4M3 ? (127 - 7) << 3 : (127 - 15) << 2;
  const u32 normal = ((size + (1u << (dropped - 1)) - 1 + (size >> dropped & 1)) >> dropped) - bias;
  // Small ones are multiples of the unit in the last place of this number.
  const float unit_holder = kind == E4M3 ? 16384.0f : 128.0f;
  const u32 small = __float_as_uint(__uint_as_float(size) + unit_holder) - __float_as_uint(unit_holder);
  u32 code = size < (kind == E4M3 ? 0x3C800000u : 0x38800000u) ? small : normal;
  const u32 top = kind == E4M3 ? 0x7E : 0x7B;
  code = code > top ? top : code;
  code = size > 0x7F800000u ? 0 : code;
  return code | (bits >> 24 & 0x80);
}

// The smallest power of two that is not below a positive number; 1 for zero.
KVRT_INLINE float power_of_two(float x) {
  return x > 0.0f ? __uint_as_float((__float_as_uint(x) + 0x7FFFFFu) & 0x7F800000u) : 1.0f;
}

// Measure the scale of heads first_head, first_head + step, ... on the first sealed page.
KVRT_INLINE void fp8_survey(const Part& part, const Source& source, int first_head, int step) {
  __shared__ float peaks[THREADS / WARP];
  for (int head = first_head; head < source.heads; head += step) {
    float peak = 0.0f;
    each_number(source.dim, [&](int t, int c) {
      const float size = fabsf(source.at(head, t, c));
      peak = size > peak ? size : peak;  // not for a NaN
    });
    for (int mask = WARP / 2; mask; mask /= 2) {
      const float other = __shfl_xor_sync(ALL_LANES, peak, mask);
      peak = other > peak ? other : peak;
    }
    if (threadIdx.x % WARP == 0) peaks[threadIdx.x / WARP] = peak;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int warp = 1; warp < THREADS / WARP; ++warp) peak = peaks[warp] > peak ? peaks[warp] : peak;
      const float largest = part.own(0) == E4M3 ? 448.0f : 57344.0f;
      part.state()[head] = power_of_two(__fdiv_rn(2.0f * peak, largest));
    }
    __syncthreads();
  }
}

KVRT_INLINE void fp8_encode(const Part& part, const Tile& tile) {
  const int kind = part.own(0);
  const float inverse = __fdiv_rn(1.0f, part.state()[part.head]);
  each_number(tile.dim, [&](int t, int c) {
    const float x = tile.at(t, c);
    tile.set_code(t, c, round_fp8(x == x ? x * inverse : x, kind));  // a NaN's sign stays
  });
  __syncthreads();
  pack_codes(tile, 8, part.is_value, part.codes());
}

// Both formats are the top of a half, but for e4m3's exponent bias of 7 instead of 15.
KVRT_INLINE void fp8_decode(const Part& part, const Tile& tile) {
  unpack_codes(part.codes(), 8, part.is_value, tile);
  const int left = part.own(0) == E4M3 ? 7 : 8;
  const float scale = part.state()[part.head], factor = part.own(0) == E4M3 ? scale * 256.0f : scale;
  each_number(tile.dim, [&](int t, int c) {
    const u32 code = tile.code(t, c);
    tile.at(t, c) = half_value(u16((code & 0x80) << 8 | (code & 0x7F) << left)) * factor;
  });
}
