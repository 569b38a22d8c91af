// The query of one KV head in the cache's basis, as B fragments: up to 8 query heads are N.
//
// A lane holds, of head lane / 4, the channels 8 s + 2 (lane % 4) + {0, 1} and those half a head further, s = 0 ...:
// the partners of a RoPE pair, as the fragment order of keys has them.
#pragma once
#include "common.cuh"

static constexpr int TILES = HEAD_DIM / 16;  // k-steps of Q K, and tiles of 16 channels
static constexpr int HALF = HEAD_DIM / 2;
static constexpr int QUERY_PITCH = HEAD_DIM + 8;  // floats of a query in shared memory: heads are not all in one bank

// How much less the high half of a head is in a Query, for codes of packed keys that weigh so much more there.
#if FORM != VIEW_PRE && (K_CODEC == 1 || K_CODEC == 2) && K_BY_ROWS && K_BITS < 4
static constexpr float LESS_HIGH = K_BITS == 3 ? 8.0f : 16.0f;
#else
static constexpr float LESS_HIGH = 1.0f;
#endif

// Whether a lane keeps in registers what `make_four` starts from. With outliers none are left.
#if K_CODEC == 4 && K_SLOTS > 0
static constexpr bool KEEPS_FOUR = false;
#else
static constexpr bool KEEPS_FOUR = FEW_HEADS && HEAD_DIM <= 128;
#endif
static_assert(!FEW_HEADS || (FORM != VIEW_POST && K_KIND != 2 && HEAD_DIM % 32 == 0), "what make_four is for");

struct Query {
  u32 low[TILES], high[TILES];  // f16 (bf16: what rounds to it), scaled by a power of two so that halves are not wasted
#if K_KIND == 2
  u32 low_rest[TILES], high_rest[TILES];  // what bf16 leaves over, as bf16
#endif
  float scale, unscale;  // that power of two for head lane / 4, and its inverse
  float kept[TILES][2];  // see `read_four`
};

// One step of a Hadamard transform between channels of which the lane holds both.
KVRT_INLINE void butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// The same between lanes that differ in `bit`.
KVRT_INLINE void lane_butterfly(float& x, int bit) {
  const float other = __shfl_xor_sync(ALL_LANES, x, bit);
  x = threadIdx.x & bit ? other - x : x + other;
}

// x[c / 8][one] in blocks of `BLOCK` channels, orthonormal; bits 1, 2 of c are the lane's.
//
// With SHARED, bit 3 is bit 4 of the lane, and this is x[c / 16][one].
template <int BLOCK, bool SHARED, int COUNT>
KVRT_INLINE void hadamard(float (&x)[COUNT][2]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if (BLOCK >= 2) butterfly(x[i][0], x[i][1]);
#pragma unroll
    for (int one = 0; one < 2; ++one) {
      if (BLOCK >= 4) lane_butterfly(x[i][one], 1);
      if (BLOCK >= 8) lane_butterfly(x[i][one], 2);
      if (SHARED && BLOCK >= 16) lane_butterfly(x[i][one], 16);
    }
  }
#pragma unroll
  for (int bit = 1; (SHARED ? 32 : 16) * bit <= BLOCK; bit *= 2)
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (!(i & bit))
#pragma unroll
        for (int one = 0; one < 2; ++one) butterfly(x[i][one], x[i | bit][one]);
  const float norm = rsqrtf(float(BLOCK));
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    x[i][0] *= norm;
    x[i][1] *= norm;
  }
}

// Two neighbours, the first at an even place.
KVRT_INLINE float2 load_pair(const float* place) { return *reinterpret_cast<const float2*>(place); }

// Channels c, c + 1 of both halves of q (2, HALF) f32 in shared memory.
KVRT_INLINE void read_query(float (&low)[2], float (&high)[2], const float* q, int c) {
  const float2 x = load_pair(q + c), y = load_pair(q + HALF + c);
  low[0] = x.x;
  low[1] = x.y;
  high[0] = y.x;
  high[1] = y.y;
}

// Turn such channels backwards.
KVRT_INLINE void turn_back(float (&low)[2], float (&high)[2], float2 cosine, float2 sine) {
  const float2 a = {low[0], low[1]}, b = {high[0], high[1]};
  low[0] = a.x * cosine.x + b.x * sine.x;
  low[1] = a.y * cosine.y + b.y * sine.y;
  high[0] = b.x * cosine.x - a.x * sine.x;
  high[1] = b.y * cosine.y - a.y * sine.y;
}

// The power of two to multiply a query by whose squares sum up to so much, and its inverse. The norm becomes
// 2^7 ... 2^8: no channel is beyond, and with scales up to 255 all products are halves.
KVRT_INLINE float scale_of(float squares, float& unscale) {
  const int exponent = int(__float_as_uint(squares) >> 23 & 255) - 127;
  const int up = squares > 1e-30f ? 7 - (exponent >> 1) : 0;
  unscale = __uint_as_float(u32(127 - up) << 23);
  return __uint_as_float(u32(127 + up) << 23);
}

// Whether a query has the same norm wherever it is turned to: then its scale is found once.
static constexpr bool SAME_NORM = !K_NORM;

KVRT_INLINE void find_scale(Query& query, const float* q) {
  const int lane = threadIdx.x % WARP, head = FEW_HEADS ? lane / 4 % 4 : lane / 4;
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i) {
    const float2 x = load_pair(q + head * QUERY_PITCH + 8 * i + 2 * (lane % 4));
    squares += x.x * x.x + x.y * x.y;
  }
  squares += __shfl_xor_sync(ALL_LANES, squares, 1);
  squares += __shfl_xor_sync(ALL_LANES, squares, 2);
  query.scale = scale_of(squares, query.unscale);
  if (FEW_HEADS && lane >= 16) query.unscale = 0;  // as `make_four` has it
}

// Make fragments of q (8, QUERY_PITCH) f32 in shared memory, after RoPE and scaled: turned backwards by the angles of
// `base` (2, HALF) f32 if there are any, transformed, multiplied by `factors` (HEAD_DIM,) f32 if there are any.
KVRT_INLINE void make_query(Query& query, const float* q, const float* base, const float* factors) {
  const int lane = threadIdx.x % WARP, head = lane / 4, col = lane % 4;
  float x[2 * TILES][2];
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    const int c = 8 * s + 2 * col;
    read_query(x[s], x[TILES + s], q + head * QUERY_PITCH, c);
    if (base != nullptr) turn_back(x[s], x[TILES + s], load_pair(base + c), load_pair(base + HALF + c));
  }
#if K_HADAMARD > 0
  hadamard<K_HADAMARD, false>(x);
#endif
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i)
#pragma unroll
    for (int one = 0; one < 2; ++one) {
      if (factors != nullptr) x[i][one] *= __ldg(factors + 8 * i + 2 * col + one);
      squares += x[i][one] * x[i][one];
    }
  if (!SAME_NORM) {
    squares += __shfl_xor_sync(ALL_LANES, squares, 1);
    squares += __shfl_xor_sync(ALL_LANES, squares, 2);
    query.scale = scale_of(squares, query.unscale);
  }
  const float scale = query.scale, above = scale / LESS_HIGH;
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    const float a = x[s][0] * scale, b = x[s][1] * scale, c = x[TILES + s][0] * above, d = x[TILES + s][1] * above;
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

// What `make_four` starts from, of q (8, QUERY_PITCH) f32 in shared memory: channels of the low half of the head in the
// tiles 2 t + lane / 16, t = 0 ..., then those of the high half; scaled already if the scale is always the same.
KVRT_INLINE void read_four(float (&x)[TILES][2], const Query& query, const float* q) {
  const int lane = threadIdx.x % WARP, first = 8 * (lane / 16) + 2 * (lane % 4);
#pragma unroll
  for (int t = 0; t < TILES / 2; ++t)
    read_query(x[t], x[TILES / 2 + t], q + lane / 4 % 4 * QUERY_PITCH, 16 * t + first);
  if (SAME_NORM)
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int one = 0; one < 2; ++one) x[i][one] *= query.scale;
}

// As `make_query`, where at most four of the query heads are wanted: a lane makes half of one, for itself and for
// lane ^ 16. The other four are the same once more, but that tiles 2 t and 2 t + 1 change places, with an `unscale` of
// 0, which makes their scores 0.
#if FEW_HEADS
KVRT_INLINE void make_four(Query& query, const float* q, const float* base, const float* factors) {
  const int lane = threadIdx.x % WARP, part = lane / 16, first = 8 * part + 2 * (lane % 4);
  float x[TILES][2];
  if (KEEPS_FOUR) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int one = 0; one < 2; ++one) x[i][one] = query.kept[i][one];
  } else {
    read_four(x, query, q);
  }
#pragma unroll
  for (int t = 0; t < TILES / 2; ++t) {
    const float* angles = base + 16 * t + first;
    turn_back(x[t], x[TILES / 2 + t], load_pair(angles), load_pair(angles + HALF));
  }
#if K_HADAMARD > 0
  hadamard<K_HADAMARD, true>(x);
#endif
  if (!SAME_NORM) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int one = 0; one < 2; ++one) {
        if (factors != nullptr) x[i][one] *= __ldg(factors + 16 * i + first + one);
        squares += x[i][one] * x[i][one];
      }
    squares += __shfl_xor_sync(ALL_LANES, squares, 1);
    squares += __shfl_xor_sync(ALL_LANES, squares, 2);
    squares += __shfl_xor_sync(ALL_LANES, squares, 16);
    query.scale = scale_of(squares, query.unscale);
    if (part) query.unscale = 0;
  }
  const float scale = SAME_NORM ? 1.0f : query.scale, above = scale / LESS_HIGH;
#pragma unroll
  for (int t = 0; t < TILES / 2; ++t) {
    query.low[2 * t] = ptx::pack_half(x[t][0] * scale, x[t][1] * scale);
    query.high[2 * t] = ptx::pack_half(x[TILES / 2 + t][0] * above, x[TILES / 2 + t][1] * above);
    query.low[2 * t + 1] = __shfl_xor_sync(ALL_LANES, query.low[2 * t], 16);
    query.high[2 * t + 1] = __shfl_xor_sync(ALL_LANES, query.high[2 * t], 16);
  }
}
#endif
