// llama.cpp's q8_0 and q4_0: blocks of 32 channels of a token. Twin of kvrt/kvstore/codecs/blocks.py.
#pragma once
#include "codec.cuh"

static constexpr int BLOCK = 32;

// The nearest integer, halves away from zero; 0 for a NaN.
KVRT_INLINE int round_away(float x) {
  float whole = truncf(x);
  if (fabsf(x - whole) >= 0.5f) whole += x > 0.0f ? 1.0f : -1.0f;
  return whole == whole ? int(whole) : 0;
}

// Write scales; the codes replace the tile's numbers. One thread a block.
KVRT_INLINE void block_encode(const Part& part, const Tile& tile) {
  const int bits = part.own(0);
  for (int i = threadIdx.x; i < tile.dim / BLOCK * PAGE_TOKENS; i += THREADS) {
    const int place = i % PAGE_TOKENS, start = i / PAGE_TOKENS * BLOCK;
    const int t = part.is_value ? column_at(place, PAGE_TOKENS, 1) : place;
    float largest = 0.0f;  // with its sign: q4_0 gives it the code that has no opposite
    for (int c = start; c < start + BLOCK; ++c)
      if (fabsf(tile.at(t, c)) > fabsf(largest)) largest = tile.at(t, c);
    const float scale = bits == 8 ? __fdiv_rn(fabsf(largest), 127.0f) : __fdiv_rn(largest, -8.0f);
    const float inverse = scale != 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f;
    part.meta()[i] = half_bits(scale);
    for (int c = start; c < start + BLOCK; ++c) {
      const float x = tile.at(t, c) * inverse;
      int code = 0;
      if (bits == 8)
        code = round_away(x) + 128;
      else if (x == x)
        code = int(x + 8.5f);
      tile.set_code(t, c, bits == 8 || code < 15 ? code : 15);
    }
  }
  __syncthreads();
  pack_codes(tile, bits, part.is_value, part.codes());
}

KVRT_INLINE void block_decode(const Part& part, const Tile& tile) {
  const int bits = part.own(0);
  unpack_codes(part.codes(), bits, part.is_value, tile);
  const float zero = -float(1 << (bits - 1));
  each_number(tile.dim, [&](int t, int c) {
    const int place = part.is_value ? place_of(t, PAGE_TOKENS, 1) : t;
    const float scale = half_value(part.meta()[c / BLOCK * PAGE_TOKENS + place]);
    tile.at(t, c) = fmaf(float(tile.code(t, c)), scale, zero * scale);
  });
}
