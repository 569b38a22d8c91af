// One head's keys or values of one token, spread over a warp: lane l has channels l, l + 32, ...
//
// Every number comes out of the same operations as in kvrt/backends/cpu_store.py, so that its bits are the same.
#pragma once
#include "common.cuh"

static constexpr int MOST_CHANNELS = 256, PARTS = MOST_CHANNELS / WARP;

// cos and sin (2, dim / 2) f32 of a token, each lane's as its channels need them.
struct Angles {
  float cos[PARTS], sin[PARTS];

  KVRT_INLINE Angles() {}
  KVRT_INLINE Angles(const float* table, int dim) {
    const int half = dim / 2;
#pragma unroll
    for (int j = 0; j < PARTS; ++j) {
      const int c = threadIdx.x % WARP + j * WARP, i = c < half ? c : c - half;
      if (c >= dim) break;
      cos[j] = table[i];
      sin[j] = table[half + i];
    }
  }
};

// `exchange` is dim floats of shared memory that belong to the warp.
struct Row {
  float x[PARTS];
  int dim;
  float* exchange;

  KVRT_INLINE Row(int dim, float* exchange) : dim(dim), exchange(exchange) {}

  // Call with (number, channel) for each of the lane's.
  template <class Function>
  KVRT_INLINE void each(Function function) {
#pragma unroll
    for (int j = 0; j < PARTS; ++j) {
      const int c = threadIdx.x % WARP + j * WARP;
      if (c < dim) function(x[j], c);
    }
  }

  // Infinities too: the difference of two would be a NaN.
  KVRT_INLINE void hold() {
    each([](float& value, int) { value = value > 1e30f ? 1e30f : value < -1e30f ? -1e30f : value; });
  }

  // Rotate the pairs (i, i + dim / 2); way is 1, or -1 for backwards.
  KVRT_INLINE void turn(const Angles& angles, float way) {
    const int half = dim / 2;
    each([&](float value, int c) { exchange[c] = value; });
    __syncwarp();
#pragma unroll
    for (int j = 0; j < PARTS; ++j) {
      const int c = threadIdx.x % WARP + j * WARP;
      if (c >= dim) break;
      const float cos = angles.cos[j], sin = way * angles.sin[j];
      x[j] = c < half ? x[j] * cos - exchange[c + half] * sin : x[j] * cos + exchange[c - half] * sin;
    }
    __syncwarp();
  }

  // x += sign * bias (dim,), which is rotated by the angles unless it is `plain`.
  KVRT_INLINE void add(const float* bias, const Angles& angles, bool plain, float sign) {
    const int half = dim / 2;
#pragma unroll
    for (int j = 0; j < PARTS; ++j) {
      const int c = threadIdx.x % WARP + j * WARP;
      if (c >= dim) break;
      float own = bias[c];
      if (!plain) {
        const float cos = angles.cos[j], sin = angles.sin[j];
        own = c < half ? own * cos - bias[c + half] * sin : own * cos + bias[c - half] * sin;
      }
      x[j] += sign * own;
    }
  }

  // The Hadamard transform of blocks of channels, a power of two that divides dim; its own inverse.
  KVRT_INLINE void hadamard(int block) {
#pragma unroll
    for (int by = 1; by < WARP; by *= 2) {
      if (by >= block) break;
#pragma unroll
      for (int j = 0; j < PARTS; ++j) {
        const float other = __shfl_xor_sync(ALL_LANES, x[j], by);
        x[j] = threadIdx.x & by ? other - x[j] : x[j] + other;
      }
    }
#pragma unroll
    for (int by = 1; by < PARTS; by *= 2) {
      if (by * WARP >= block) break;
#pragma unroll
      for (int j = 0; j < PARTS; ++j) {
        if (j & by) continue;
        const float a = x[j], b = x[j + by];
        x[j] = a + b;
        x[j + by] = a - b;
      }
    }
    const float factor = __fdiv_rn(1.0f, __fsqrt_rn(float(block)));
#pragma unroll
    for (int j = 0; j < PARTS; ++j) x[j] *= factor;
  }
};
