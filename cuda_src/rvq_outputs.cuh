// The mean of values, from histograms of weights: by a CTA for each book, of which the last one adds up all.
#pragma once
#include "rvq_shape.cuh"

namespace outputs {
static constexpr int LANES = HEAD_DIM / 8;             // threads of a row of entries, 8 channels each
static constexpr int ROWS = THREADS / LANES;           // that are read at once
static constexpr int BATCH = V_ENTRIES / ROWS < 8 ? V_ENTRIES / ROWS : 8;
static constexpr int STRIDE = HEAD_DIM + 8;  // of a head's sums, in floats

// A thread's 8 channels of every ROWS-th entry.
struct Entries {
  uint4 of[BATCH];

  KVRT_INLINE void read(const u16* entries, int first) {
    const u16* own = entries + i64(first + threadIdx.x / LANES) * HEAD_DIM + threadIdx.x % LANES * 8;
#pragma unroll
    for (int i = 0; i < BATCH; ++i) of[i] = ptx::load_stream(own + i * ROWS * HEAD_DIM);
  }
};

// Shared memory: weights of the book's entries, then sums of warps, then factors of splits, of pages and exact tokens.
struct Shared {
  float4* weights;  // (V_ENTRIES,) of HEADS heads
  float* sums;      // (WARPS, HEADS, STRIDE)
  float4 *of_pages, *of_exact;

  KVRT_INLINE explicit Shared(u8* place) {
    weights = reinterpret_cast<float4*>(place);
    sums = reinterpret_cast<float*>(weights + V_ENTRIES);
    of_pages = reinterpret_cast<float4*>(sums + WARPS * HEADS * STRIDE);
  }

  // What splits' weights are to be multiplied by, so that all sum up to 1. states (splits, STATE_FLOATS).
  KVRT_INLINE void find_factors(const float* states, int packed, int exact) {
    of_exact = of_pages + packed;
    const int lane = threadIdx.x % WARP, h = threadIdx.x / WARP;
    if (h >= HEADS) return;
    const auto stats = [&](int i) {
      const bool is_exact = i >= packed;
      const float* own = states + i64(is_exact ? i - packed : i) * STATE_FLOATS + (is_exact ? 2 * HEADS : 0);
      return reinterpret_cast<const float2*>(own)[h];
    };
    float top = NOTHING, total = 0;
    for (int i = lane; i < packed + exact; i += WARP) top = fmaxf(top, stats(i).x);
    top = warp_maximum(top);
    for (int i = lane; i < packed + exact; i += WARP) {
      const float2 own = stats(i);
      total += own.y * ptx::exp2(own.x - top);
    }
    total = 1.0f / warp_sum(total);
    for (int i = lane; i < packed + exact; i += WARP)
      reinterpret_cast<float*>(of_pages + i)[h] = ptx::exp2(stats(i).x - top) * (i < packed ? total / WRITTEN : total);
  }

  // histograms (splits, V_ENTRIES, HEADS) f16.
  KVRT_INLINE void merge_weights(const u16* histograms, int packed) const {
    for (int entry = threadIdx.x; entry < V_ENTRIES; entry += THREADS) {
      const u16* own = histograms + entry * HEADS;
      float4 sum = {0, 0, 0, 0};
#pragma unroll 8
      for (int i = 0; i < packed; ++i) {
        const uint2 x = ptx::load_stream8(own + i64(i) * V_ENTRIES * HEADS);
        const float2 a = ptx::unpack_half(x.x), b = ptx::unpack_half(x.y);
        const float4& f = of_pages[i];
        sum = {sum.x + a.x * f.x, sum.y + a.y * f.y, sum.z + b.x * f.z, sum.w + b.y * f.w};
      }
      weights[entry] = sum;
    }
  }

  // to (HEADS, HEAD_DIM) f32 = the weights' products with entries, of which the first are in registers.
  KVRT_INLINE void multiply(Entries& own, const u16* entries, float* to) const {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float mine[HEADS][8] = {};
#pragma unroll 1
    for (int first = 0; first < V_ENTRIES; first += ROWS * BATCH) {
      if (first > 0) own.read(entries, first);
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const float4 w = weights[first + i * ROWS + threadIdx.x / LANES];
        const uint4& x = own.of[i];
        const float2 pairs[4] = {ptx::unpack_half(x.x), ptx::unpack_half(x.y), ptx::unpack_half(x.z),
                                 ptx::unpack_half(x.w)};
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const float value = c % 2 ? pairs[c / 2].y : pairs[c / 2].x;
          mine[0][c] += w.x * value;
          mine[1][c] += w.y * value;
          mine[2][c] += w.z * value;
          mine[3][c] += w.w * value;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
#pragma unroll
      for (int c = 0; c < 8; ++c)
#pragma unroll
        for (int way = LANES; way < WARP; way *= 2) mine[h][c] += __shfl_xor_sync(ALL_LANES, mine[h][c], way);
    if (lane < LANES)
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        float4* place = reinterpret_cast<float4*>(sums + (warp * HEADS + h) * STRIDE + lane * 8);
        place[0] = {mine[h][0], mine[h][1], mine[h][2], mine[h][3]};
        place[1] = {mine[h][4], mine[h][5], mine[h][6], mine[h][7]};
      }
    __syncthreads();
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += THREADS) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += sums[(w * HEADS + i / HEAD_DIM) * STRIDE + i % HEAD_DIM];
      to[i] = sum;
    }
  }

  // out (heads, HEAD_DIM) f32 = the books' partials (V_STAGES, HEADS, HEAD_DIM) and the exact tokens' part, without the
  // values' transform.
  KVRT_INLINE void finish(const float* partials, const float* states, int exact, int hadamard, float4* out,
                          int heads) const {
    for (int i = threadIdx.x; i < HEADS * HEAD_DIM / 2; i += THREADS) {
      const int h = i / (HEAD_DIM / 2);
      float2 sum = {0, 0};
#pragma unroll 8
      for (int book = 0; book < V_STAGES; ++book) {
        const float2* own = reinterpret_cast<const float2*>(partials + book * HEADS * HEAD_DIM);
        add_to(sum, ptx::load_relaxed(own + i), 1.0f);
      }
#pragma unroll 8
      for (int s = 0; s < exact; ++s) {
        const float2* own = reinterpret_cast<const float2*>(states + i64(s) * STATE_FLOATS + 4 * HEADS);
        add_to(sum, own[i], reinterpret_cast<const float*>(of_exact + s)[h]);
      }
      reinterpret_cast<float2*>(sums + h * STRIDE)[i % (HEAD_DIM / 2)] = sum;
    }
    __syncthreads();
    const int lane = threadIdx.x % WARP, h = threadIdx.x / WARP;
    if (h >= heads) return;
    HeadState state;
    if (lane < QUARTERS) state.sums[0] = reinterpret_cast<const float4*>(sums + h * STRIDE)[lane];
    unrotate(state, hadamard);
    if (lane < QUARTERS) out[h * QUARTERS + lane] = state.sums[0];
  }
};
}  // namespace outputs
