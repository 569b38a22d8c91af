// Sums over a warp and over a block.
#pragma once
#include "common.cuh"

KVRT_INLINE float warp_sum(float x) {
  for (int by = WARP / 2; by; by >>= 1) x += __shfl_xor_sync(ALL_LANES, x, by);
  return x;
}

// The sum over all threads, for all threads; `scratch` holds 32 floats. Whole warps only.
KVRT_INLINE float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  __syncthreads();  // an earlier sum has been read
  if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
  __syncthreads();
  float total = 0;
  for (int i = 0; i < int(blockDim.x / WARP); ++i) total += scratch[i];
  return total;
}

KVRT_INLINE float silu(float x) { return x / (1.0f + __expf(-x)); }
