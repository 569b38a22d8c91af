// The query of one KV head in the cache's basis, as B fragments: up to 8 query heads are N.
//
// A lane holds, of head lane / 4, the channels 8 s + 2 (lane % 4) + {0, 1} and those half a head further, s = 0 ...:
// the partners of a RoPE pair, as the fragment order of keys has them.
#pragma once
#include "common.cuh"

static constexpr int TILES = HEAD_DIM / 16;  // k-steps of Q K, and tiles of 16 channels
static constexpr int HALF = HEAD_DIM / 2;

struct Query {
  u32 low[TILES], high[TILES];  // f16 (bf16: what rounds to it), scaled by a power of two so that halves are not wasted
#if K_KIND == 2
  u32 low_rest[TILES], high_rest[TILES];  // what bf16 leaves over, as bf16
#endif
  float unscale;  // of head lane / 4
};

// One step of a Hadamard transform between channels of which the lane holds both.
KVRT_INLINE void butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// x[c / 8][one] in blocks of `BLOCK` channels, orthonormal; bits 1, 2 of c are the lane's.
template <int BLOCK>
KVRT_INLINE void hadamard(float (&x)[2 * TILES][2]) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i) {
    if (BLOCK >= 2) butterfly(x[i][0], x[i][1]);
#pragma unroll
    for (int one = 0; one < 2; ++one)
#pragma unroll
      for (int bit = 1; bit <= 2; bit *= 2)
        if (BLOCK >= 4 * bit) {
          const float other = __shfl_xor_sync(ALL_LANES, x[i][one], bit);
          x[i][one] = lane & bit ? other - x[i][one] : x[i][one] + other;
        }
  }
#pragma unroll
  for (int bit = 1; 16 * bit <= BLOCK; bit *= 2)
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i)
      if (!(i & bit))
#pragma unroll
        for (int one = 0; one < 2; ++one) butterfly(x[i][one], x[i | bit][one]);
  const float norm = rsqrtf(float(BLOCK));
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i) {
    x[i][0] *= norm;
    x[i][1] *= norm;
  }
}

// Make fragments of q (8, HEAD_DIM) f32 in shared memory, after RoPE and scaled: turned backwards by the angles of
// `base` (2, HALF) f32 if there are any, transformed, multiplied by `factors` (HEAD_DIM,) f32 if there are any.
KVRT_INLINE void make_query(Query& query, const float* q, const float* base, const float* factors) {
  const int lane = threadIdx.x % WARP, head = lane / 4, col = lane % 4;
  float x[2 * TILES][2];
#pragma unroll
  for (int s = 0; s < TILES; ++s)
#pragma unroll
    for (int one = 0; one < 2; ++one) {
      const int c = 8 * s + 2 * col + one;
      x[s][one] = q[head * HEAD_DIM + c];
      x[TILES + s][one] = q[head * HEAD_DIM + HALF + c];
      if (base != nullptr) {
        const float cosine = __ldg(base + c), sine = __ldg(base + HALF + c), low = x[s][one], high = x[TILES + s][one];
        x[s][one] = low * cosine + high * sine;
        x[TILES + s][one] = high * cosine - low * sine;
      }
    }
#if K_HADAMARD > 0
  hadamard<K_HADAMARD>(x);
#endif
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i)
#pragma unroll
    for (int one = 0; one < 2; ++one) {
      if (factors != nullptr) x[i][one] *= __ldg(factors + 8 * i + 2 * col + one);
      squares += x[i][one] * x[i][one];
    }
  squares += __shfl_xor_sync(ALL_LANES, squares, 1);
  squares += __shfl_xor_sync(ALL_LANES, squares, 2);
  // The norm becomes 2^7 ... 2^8: no channel is beyond, and with scales up to 255 all products are halves.
  const int exponent = int(__float_as_uint(squares) >> 23 & 255) - 127;
  const int up = squares > 1e-30f ? 7 - (exponent >> 1) : 0;
  const float scale = __uint_as_float(u32(127 + up) << 23);
  query.unscale = __uint_as_float(u32(127 - up) << 23);
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    const float a = x[s][0] * scale, b = x[s][1] * scale, c = x[TILES + s][0] * scale, d = x[TILES + s][1] * scale;
#if K_KIND == 2
    query.low[s] = ptx::pack_bfloat(a, b);
    query.high[s] = ptx::pack_bfloat(c, d);
    const float2 low = ptx::unpack_bfloat(query.low[s]), high = ptx::unpack_bfloat(query.high[s]);
    query.low_rest[s] = ptx::pack_bfloat(a - low.x, b - low.y);
    query.high_rest[s] = ptx::pack_bfloat(c - high.x, d - high.y);
#else
    query.low[s] = ptx::pack_half(a, b);
    query.high[s] = ptx::pack_half(c, d);
#endif
  }
}
