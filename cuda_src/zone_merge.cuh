// How warps, and then the CTAs of a head, become one result. WARPS is that of a CTA.
#pragma once
#include "zone_softmax.cuh"

// A head is merged by two warps, each a part of its channels, where there are enough.
static constexpr int PAIRS = HEAD_DIM / 2, SPLIT = WARPS >= 2 * HEADS && PAIRS > WARP ? 2 : 1;
static constexpr int PART_PAIRS = (PAIRS + SPLIT * WARP - 1) / (SPLIT * WARP) * WARP;  // the last part may have fewer
using PartState = StateOf<float2, PART_PAIRS / WARP>;
static constexpr int AT_ONCE = 20 * WARP / PART_PAIRS;  // states that are received at once

// What the warps of a CTA have found, in shared memory.
struct Found {
  // Heads are 8 words apart in the banks: they are written at once.
  static constexpr int PITCH = WARPS * HEAD_DIM + 8, FLOATS = HEADS * PITCH + 4 * WARPS * HEADS;
  float* sums;    // (HEADS, WARPS, HEAD_DIM), PITCH for a head
  float4* stats;  // (WARPS, HEADS): see Softmax::write

  KVRT_INLINE explicit Found(u8* place)
      : sums(reinterpret_cast<float*>(place)), stats(reinterpret_cast<float4*>(sums + HEADS * PITCH)) {}

  KVRT_INLINE void put(Softmax& state, int warp) const {
    state.write(stats + warp * HEADS, sums + warp * HEAD_DIM, PITCH);
  }

  // Merge what `states` warps, an even number, have put of head h: the lane's pairs of channels from `first` + lane on.
  KVRT_INLINE void merge(PartState& merged, int h, int first, int states) const {
    constexpr int EACH = PART_PAIRS / WARP, FEW = 4;  // so many states are read at once
    const int lane = threadIdx.x % WARP;
    const float4 own = lane < states ? stats[lane * HEADS + h] : float4{NOTHING, 0, 0, 0};  // of warp `lane`
    const float weight = merged.take(own.x, own.y), of_sums = weight * own.w;
    const float minimum = warp_sum(weight * own.z);
#pragma unroll
    for (int w = 0; w < WARPS; w += FEW) {
      if (w >= states) break;
      const int over = w + 2 < states ? 0 : 2;  // the last states are read once more then, and weigh nothing
      float2 parts[FEW][EACH] = {};
#pragma unroll
      for (int j = 0; j < FEW; ++j)
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
          const int pair = first + lane + WARP * i;
          const float* place = sums + h * PITCH + (w + j - (j < 2 ? 0 : over)) * HEAD_DIM;
          if (pair < PAIRS) parts[j][i] = reinterpret_cast<const float2*>(place)[Softmax::slot_of(pair)];
        }
#pragma unroll
      for (int j = 0; j < FEW; ++j) {
        const float factor = __shfl_sync(ALL_LANES, of_sums, w + j);
#pragma unroll
        for (int i = 0; i < EACH; ++i) merged.add(i, parts[j][i], factor);
      }
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) merged.add(i, {minimum, minimum}, 1.0f);
  }
};

// out (HEAD_DIM,) f32 = sums (HEAD_DIM,) f32 in shared memory, of values that were transformed in blocks of so many
// channels. By a warp.
KVRT_INLINE void finish(float4* out, const float4* sums, int hadamard) {
  HeadState head;
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int i = 0; i < PARTS; ++i)
    if (lane + WARP * i < QUARTERS) head.sums[i] = sums[lane + WARP * i];
  unrotate(head, hadamard);
#pragma unroll
  for (int i = 0; i < PARTS; ++i)
    if (lane + WARP * i < QUARTERS) out[lane + WARP * i] = head.sums[i];
}
