// The running softmax of a warp, and how warps and splits become one. WARPS is that of a CTA.
#pragma once
#include "attend_values.cuh"

static constexpr float NOTHING = -1e30f;
static constexpr float WEIGHT_BITS = 4.0f;  // weights are up to 2^4, so that small ones are not lost as halves

// The running softmax of the query heads 2 (lane % 4) and the next.
struct Softmax {
  float peak[2] = {NOTHING, NOTHING}, total[2] = {0, 0};
  float sums[TILES][4] = {}, minima[4] = {0, 0, 0, 0};

  // Take up COUNT tiles of scores (times `unscale`); they become weights.
  template <int COUNT>
  KVRT_INLINE void step(float (&scores)[COUNT][4], const float (&unscale)[2], int low, int count) {
    const int row = threadIdx.x % WARP / 4;
    float top[2] = {peak[0], peak[1]};
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 16 * j + 8 * (i >> 1) + row;
        scores[j][i] *= unscale[i & 1];
        if (token < low || token >= count) scores[j][i] = NOTHING;
        top[i & 1] = scores[j][i] > top[i & 1] ? scores[j][i] : top[i & 1];
      }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int d = 4; d < WARP; d *= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, top[h], d);
        top[h] = other > top[h] ? other : top[h];
      }
    }
    if (__any_sync(ALL_LANES, top[0] > peak[0] || top[1] > peak[1])) {
      const float shrink[2] = {ptx::exp2(peak[0] - top[0]), ptx::exp2(peak[1] - top[1])};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        total[h] *= shrink[h];
        peak[h] = top[h];
      }
#pragma unroll
      for (int s = 0; s < TILES; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[s][i] *= shrink[i & 1];
#pragma unroll
      for (int i = 0; i < 4; ++i) minima[i] *= shrink[i & 1];
    }
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // A NaN among the scores is no maximum, but it makes its weight a NaN.
        scores[j][i] = scores[j][i] == NOTHING ? 0.0f : ptx::exp2(scores[j][i] - peak[i & 1] + WEIGHT_BITS);
        total[i & 1] += scores[j][i];
      }
  }
};

// Write what a warp found, for each query head: weighted values (8, HEAD_DIM), maximum and total (8, 2).
KVRT_INLINE void write_state(float* sums, float* stats, Softmax& state) {
  const int lane = threadIdx.x % WARP, row = lane / 4, col = lane % 4;
#if (V_CODEC == 1 || V_CODEC == 2) && V_BY_ROWS
  // Row g of the tile of minima belongs to all channels of group g.
#pragma unroll
  for (int s = 0; s < TILES; ++s)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float shift = __shfl_sync(ALL_LANES, state.minima[h], 16 * s / V_GROUP * 4 + col);
      state.sums[s][h] += shift;
      state.sums[s][2 + h] += shift;
    }
#endif
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int d = 4; d < WARP; d *= 2) state.total[h] += __shfl_xor_sync(ALL_LANES, state.total[h], d);
    float* mine = sums + (2 * col + h) * HEAD_DIM;
    if (row == 0) {
      stats[2 * (2 * col + h)] = state.peak[h];
      stats[2 * (2 * col + h) + 1] = state.total[h];
    }
#pragma unroll
    for (int s = 0; s < TILES; ++s) {
      mine[16 * s + row] = state.sums[s][h];
      mine[16 * s + 8 + row] = state.sums[s][2 + h];
    }
  }
}

// Merge `count` states of up to 8 query heads: sums (count, 8, HEAD_DIM), stats (count, 8, 2) of maximum and total.
//
// merged (heads, HEAD_DIM) and merged_stats (8, 2), in shared memory, get the result; `weights` (8, count) f32 there is
// scratch. Every load of a step is independent of the others: what this costs is latency.
KVRT_INLINE void merge(const float* sums, const float* stats, int count, int heads, float* weights, float* merged,
                       float* merged_stats) {
  const int lane = threadIdx.x % WARP;
  for (int h = threadIdx.x / WARP; h < heads; h += WARPS) {
    float peak = NOTHING, total = 0;
    for (int i = lane; i < count; i += WARP) {
      const float other = stats[(i * 8 + h) * 2];
      weights[h * count + i] = other;
      peak = other > peak ? other : peak;
    }
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
      const float other = __shfl_xor_sync(ALL_LANES, peak, d);
      peak = other > peak ? other : peak;
    }
    for (int i = lane; i < count; i += WARP) {
      const float weight = ptx::exp2(weights[h * count + i] - peak);
      weights[h * count + i] = weight;
      total += weight * stats[(i * 8 + h) * 2 + 1];
    }
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) total += __shfl_xor_sync(ALL_LANES, total, d);
    if (lane == 0) {
      merged_stats[2 * h] = peak;
      merged_stats[2 * h + 1] = total;
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < heads * HEAD_DIM / 4; at += WARPS * WARP) {
    const int h = at * 4 / HEAD_DIM;
    const float4* source = reinterpret_cast<const float4*>(sums) + at;
    float4 sum = {0, 0, 0, 0};
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const float weight = weights[h * count + i];
      const float4 part = source[i64(i) * 8 * HEAD_DIM / 4];
      sum.x += weight * part.x;
      sum.y += weight * part.y;
      sum.z += weight * part.z;
      sum.w += weight * part.w;
    }
    reinterpret_cast<float4*>(merged)[at] = sum;
  }
  __syncthreads();
}
