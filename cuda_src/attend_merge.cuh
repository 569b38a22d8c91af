// The state of one query head as a warp has it, and how CTAs hand theirs over. Of heads of HEAD_DIM channels.
#pragma once
#include "common.cuh"

static constexpr float NOTHING = -1e30f;

// The state of one query head, over a warp: sums[i] are the channels 4 (lane + 32 i) ... + 3.
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

struct HeadState {
  float peak = NOTHING, total = 0;
  float4 sums[PARTS] = {};

  // Make room for the states that the lanes know maximum and total of: (NOTHING, 0) for none. Returns the weight of
  // the lane's.
  KVRT_INLINE float take(float other_peak, float other_total) {
    const float top = fmaxf(peak, warp_maximum(other_peak));
    const float shrink = ptx::exp2(peak - top), weight = ptx::exp2(other_peak - top);
    peak = top;
    total = total * shrink + warp_sum(weight * other_total);
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      sums[i].x *= shrink;
      sums[i].y *= shrink;
      sums[i].z *= shrink;
      sums[i].w *= shrink;
    }
    return weight;
  }
  KVRT_INLINE void add(int i, const float4& other, float weight) {
    sums[i].x += weight * other.x;
    sums[i].y += weight * other.y;
    sums[i].z += weight * other.z;
    sums[i].w += weight * other.w;
  }
};

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
KVRT_INLINE bool has_arrived(float x) { return __float_as_uint(x) != 0; }

// sums (HEAD_DIM,) and stats (2,) of one head and CTA.
KVRT_INLINE void send(const HeadState& state, float* sums, float* stats) {
  const int lane = threadIdx.x % WARP;
  if (lane == 0) ptx::store_relaxed2(stats, {to_send(state.peak), to_send(state.total)});
#pragma unroll
  for (int i = 0; i < PARTS; ++i)
    if (lane + WARP * i < QUARTERS) {
      const float4& x = state.sums[i];
      ptx::store_relaxed4(sums + 4 * (lane + WARP * i), {to_send(x.x), to_send(x.y), to_send(x.z), to_send(x.w)});
    }
}

// Merge what `count` CTAs found of one head: `own` of CTA number `self`, and what the others send: sums (count, 8,
// HEAD_DIM) from this head on, and stats (count, 8, 2). In the order of their numbers, so that the last bit of the
// result does not depend on who was the last. The states of MOST heads of 128 channels are under way at once.
template <int MOST = 16>
KVRT_INLINE void receive(HeadState& state, const HeadState& own, int self, float* sums, float* stats, int count) {
  constexpr int AT_ONCE = MOST / PARTS;
  const int lane = threadIdx.x % WARP;
  for (int first = 0; first < count; first += AT_ONCE) {
    const int left = count - first;
    float4 parts[AT_ONCE][PARTS];
    float2 mine = {NOTHING, 0};
    bool complete;
    do {
      complete = true;
      if (lane < AT_ONCE && lane < left) {
        mine = first + lane == self ? float2{to_send(own.peak), to_send(own.total)}
                                    : ptx::load_relaxed2(stats + (first + lane) * 16);
        complete = has_arrived(mine.x) && has_arrived(mine.y);
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
        for (int i = 0; i < PARTS; ++i)
          if (j < left && first + j != self && lane + WARP * i < QUARTERS)
            parts[j][i] = ptx::load_relaxed4(sums + i64(first + j) * 8 * HEAD_DIM + 4 * (lane + WARP * i));
          else
            parts[j][i] = {-0.0f, -0.0f, -0.0f, -0.0f};
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
          const float4& x = parts[j][i];
          complete = complete && has_arrived(x.x) && has_arrived(x.y) && has_arrived(x.z) && has_arrived(x.w);
        }
    } while (!complete);
    __syncwarp();
    const float weight = state.take(mine.x, mine.y);
    if (lane < AT_ONCE && lane < left) *reinterpret_cast<float2*>(stats + (first + lane) * 16) = {0, 0};
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const float factor = __shfl_sync(ALL_LANES, weight, j);
#pragma unroll
      for (int i = 0; i < PARTS; ++i) {
        state.add(i, first + j == self ? own.sums[i] : parts[j][i], j < left ? factor : 0.0f);
        if (j < left && lane + WARP * i < QUARTERS)
          *reinterpret_cast<float4*>(sums + i64(first + j) * 8 * HEAD_DIM + 4 * (lane + WARP * i)) = {0, 0, 0, 0};
      }
    }
  }
}
