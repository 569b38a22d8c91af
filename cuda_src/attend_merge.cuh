// The state of one query head as a warp has it, and how CTAs hand theirs over. Of heads of HEAD_DIM channels.
#pragma once
#include "common.cuh"

static constexpr float NOTHING = -1e30f;

// The float4s of a head, and how many of them a lane has where a warp has it whole.
static constexpr int QUARTERS = HEAD_DIM / 4, PARTS = (QUARTERS + WARP - 1) / WARP;

KVRT_INLINE float warp_maximum(float x) {
#pragma unroll
  for (int d = 1; d < WARP; d *= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, d));
  return x;
}
KVRT_INLINE float warp_sum(float x) {
#pragma unroll
  for (int d = 1; d < WARP; d *= 2) x += __shfl_xor_sync(ALL_LANES, x, d);
  return x;
}

KVRT_INLINE void scale_by(float2& x, float factor) { x = {x.x * factor, x.y * factor}; }
KVRT_INLINE void scale_by(float4& x, float factor) {
  x = {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
}
KVRT_INLINE void add_to(float2& x, const float2& other, float weight) {
  x.x += weight * other.x;
  x.y += weight * other.y;
}
KVRT_INLINE void add_to(float4& x, const float4& other, float weight) {
  x.x += weight * other.x;
  x.y += weight * other.y;
  x.z += weight * other.z;
  x.w += weight * other.w;
}

// The softmax of one query head, and of its weighted sums those of the Vectors (float2 or float4) lane + 32 i behind
// some first one.
template <typename Vector, int COUNT>
struct StateOf {
  float peak = NOTHING, total = 0;
  Vector sums[COUNT] = {};

  // Make room for the states that the lanes know maximum and total of: (NOTHING, 0) for none. Returns the weight of
  // the lane's.
  KVRT_INLINE float take(float other_peak, float other_total) {
    const float top = fmaxf(peak, warp_maximum(other_peak));
    const float shrink = ptx::exp2(peak - top), weight = ptx::exp2(other_peak - top);
    peak = top;
    total = total * shrink + warp_sum(weight * other_total);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) scale_by(sums[i], shrink);
    return weight;
  }
  KVRT_INLINE void add(int i, const Vector& other, float weight) { add_to(sums[i], other, weight); }
};
// A whole head over a warp.
using HeadState = StateOf<float4, PARTS>;

// Undo the Hadamard transform of the sums in blocks of `block` channels, a power of two; 0: there was none.
KVRT_INLINE void unrotate(HeadState& state, int block) {
  if (block == 0) return;
  const float factor = rsqrtf(float(block));
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    float4& x = state.sums[i];
    const float a = x.x + x.y, b = x.x - x.y, c = x.z + x.w, d = x.z - x.w;  // blocks are 16 channels at least
    x = {(a + c) * factor, (b + d) * factor, (a - c) * factor, (b - d) * factor};
    for (int way = 1; way < WARP && 4 * way < block; way *= 2) {
      const float sign = threadIdx.x % WARP & way ? -1.0f : 1.0f;
      x.x = __shfl_xor_sync(ALL_LANES, x.x, way) + sign * x.x;
      x.y = __shfl_xor_sync(ALL_LANES, x.y, way) + sign * x.y;
      x.z = __shfl_xor_sync(ALL_LANES, x.z, way) + sign * x.z;
      x.w = __shfl_xor_sync(ALL_LANES, x.w, way) + sign * x.w;
    }
  }
  if constexpr (PARTS == 2) {
    if (block <= 4 * WARP) return;
    const float4 low = state.sums[0], high = state.sums[1];
    state.sums[0] = {low.x + high.x, low.y + high.y, low.z + high.z, low.w + high.w};
    state.sums[1] = {low.x - high.x, low.y - high.y, low.z - high.z, low.w - high.w};
  }
}

// CTAs hand over their states in memory that is zero before and after: a word that is no longer zero has arrived, so
// neither a fence nor a flag is needed. Zeros are sent as -0.
KVRT_INLINE float to_send(float x) { return x == 0 ? -0.0f : x; }
KVRT_INLINE float2 to_send(const float2& x) { return {to_send(x.x), to_send(x.y)}; }
KVRT_INLINE float4 to_send(const float4& x) { return {to_send(x.x), to_send(x.y), to_send(x.z), to_send(x.w)}; }
KVRT_INLINE bool has_arrived(float x) { return __float_as_uint(x) != 0; }
KVRT_INLINE bool has_arrived(const float2& x) { return has_arrived(x.x) && has_arrived(x.y); }
KVRT_INLINE bool has_arrived(const float4& x) {
  return has_arrived(x.x) && has_arrived(x.y) && has_arrived(x.z) && has_arrived(x.w);
}

// Where the states of a head, or of a part of it, are handed over: CTA number i has its sums in `vectors` Vectors from
// sums + i * 8 * HEAD_DIM on, and maximum and total of its weights in stats[i * pitch].
struct Handed {
  float* sums;
  float2* stats;
  int pitch = 8, vectors = QUARTERS;

  // Those of the CTAs from a number on.
  KVRT_INLINE Handed from(int cta) const {
    return {sums + i64(cta) * 8 * HEAD_DIM, stats + cta * pitch, pitch, vectors};
  }
  // The lane's Vector number i, if it `has` one.
  template <typename Vector>
  KVRT_INLINE Vector* place(int cta, int i) const {
    constexpr int APART = int(8 * HEAD_DIM * sizeof(float) / sizeof(Vector));
    return reinterpret_cast<Vector*>(sums) + threadIdx.x % WARP + WARP * i + cta * APART;
  }
  KVRT_INLINE bool has(int i) const { return int(threadIdx.x) % WARP + WARP * i < vectors; }
};

template <typename Vector, int COUNT>
KVRT_INLINE void send(const StateOf<Vector, COUNT>& state, const Handed& to) {
  if (threadIdx.x % WARP == 0) ptx::store_relaxed(to.stats, to_send(float2{state.peak, state.total}));
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    if (to.has(i)) ptx::store_relaxed(to.place<Vector>(0, i), to_send(state.sums[i]));
}

// Merge what `count` CTAs send, the own one too. In the order of their numbers, so that the last bit of the result does
// not depend on who was the last. AT_ONCE states are under way at once; those that are not there yet are read again.
template <int AT_ONCE, typename Vector, int COUNT>
KVRT_INLINE void receive(StateOf<Vector, COUNT>& state, const Handed& handed, int count) {
  static_assert(AT_ONCE <= WARP, "a bit for each");
  const int lane = threadIdx.x % WARP;
  __syncwarp();  // lanes wait for what the others sent
  for (int first = 0; first < count; first += AT_ONCE) {
    const Handed from = handed.from(first);
    const int left = min(AT_ONCE, count - first);
    const u32 wanted = ALL_LANES >> (WARP - left);
    float2 stats = {NOTHING, 0};
    Vector parts[AT_ONCE][COUNT] = {};
    u32 missing = wanted;  // the same in all lanes
    do {
      if (lane < left) stats = ptx::load_relaxed(from.stats + lane * from.pitch);
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
          ptx::load_relaxed_if(parts[j][i], from.place<Vector>(j, i), missing >> j & u32(from.has(i)));
      u32 absent = lane < left && !has_arrived(stats) ? 1u << lane : 0;
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
          if (!has_arrived(parts[j][i]) && from.has(i)) absent |= 1u << j;
      missing = __reduce_or_sync(ALL_LANES, absent) & wanted;
    } while (missing);
    const float weight = state.take(stats.x, stats.y);
    if (lane < left) from.stats[lane * from.pitch] = {0, 0};
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const float factor = __shfl_sync(ALL_LANES, weight, j);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        state.add(i, parts[j][i], factor);
        if (j < left && from.has(i)) *from.place<Vector>(j, i) = {};
      }
    }
  }
}
