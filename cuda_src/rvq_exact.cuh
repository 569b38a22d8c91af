// Attention over exact tokens, the tail and the sinks, beside that over vector quantised pages: few, so without tensor
// cores, while tables are fetched.
#pragma once
#include "rvq_shape.cuh"

// The softmax of four query heads over some tokens: a lane has the channels from EACH * lane on.
struct ExactState {
  static constexpr int EACH = HEAD_DIM / WARP;
  static constexpr int FLOATS = HEADS * (HEAD_DIM + 2);  // in shared memory: sums, then (peak, total) of each head
  float peak[HEADS], total[HEADS], sums[HEADS][EACH];

  KVRT_INLINE ExactState() {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      peak[h] = NOTHING;
      total[h] = 0;
#pragma unroll
      for (int c = 0; c < EACH; ++c) sums[h][c] = 0;
    }
  }

  // Take up the tokens `begin`, begin + step, ... of tail and sinks. queries (HEADS, HEAD_DIM) f32.
  KVRT_INLINE void attend(const Tokens& tokens, const i64* layer, int head, int begin, int step, const float* queries) {
    constexpr int COUNT = 4;  // at once
    const int lane = threadIdx.x % WARP, end = tokens.tail + tokens.sinks;
    if (begin >= end) return;
    float q[HEADS][EACH];
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
#pragma unroll
      for (int c = 0; c < EACH; ++c) q[h][c] = queries[h * HEAD_DIM + EACH * lane + c];
    i64 arrays[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) arrays[i] = layer[i < 2 ? VIEW_TAIL_KEYS + i : VIEW_SINK_KEYS + i - 2];
#pragma unroll 1
    for (int token = begin; token < end; token += COUNT * step) {
      float keys[COUNT][EACH], values[COUNT][EACH], scores[COUNT * HEADS];
      bool seen[COUNT];
#pragma unroll
      for (int j = 0; j < COUNT; ++j) {
        // What is not wanted is read too, as the first token, which is there.
        const int own = token + j * step < end ? token + j * step : token, sink = own - tokens.tail;
        int row = sink;
        if (sink < 0) {
          row = tokens.tail_slot + own;
          if (row >= tokens.tail_rows) row -= tokens.tail_rows;
        }
        const int position = sink < 0 ? tokens.total + sink : sink;
        seen[j] = token + j * step < end && position >= tokens.first;
        const i64 at = (i64(head) * (sink < 0 ? tokens.tail_rows : tokens.sink_rows) + row) * HEAD_DIM;
        read(keys[j], (sink < 0 ? arrays[0] : arrays[2]) + at * 2);
        read(values[j], (sink < 0 ? arrays[1] : arrays[3]) + at * 2);
      }
#pragma unroll
      for (int j = 0; j < COUNT; ++j)
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
          float sum = 0;
#pragma unroll
          for (int c = 0; c < EACH; ++c) sum += q[h][c] * keys[j][c];
          scores[j * HEADS + h] = sum;
        }
      sum_up(scores);
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        float top = peak[h], weights[COUNT];
#pragma unroll
        for (int j = 0; j < COUNT; ++j)
          if (seen[j]) top = fmaxf(top, scores[j * HEADS + h]);
        const float shrink = ptx::exp2(peak[h] - top);
        peak[h] = top;
        total[h] *= shrink;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
          weights[j] = seen[j] ? ptx::exp2(scores[j * HEADS + h] - top) : 0;
          total[h] += weights[j];
        }
#pragma unroll
        for (int c = 0; c < EACH; ++c) {
          sums[h][c] *= shrink;
#pragma unroll
          for (int j = 0; j < COUNT; ++j) sums[h][c] += weights[j] * values[j][c];
        }
      }
    }
  }

  KVRT_INLINE void write(float* place) const {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
#pragma unroll
      for (int c = 0; c < EACH; ++c) place[h * HEAD_DIM + EACH * lane + c] = sums[h][c];
      if (lane == 0) reinterpret_cast<float2*>(place + HEADS * HEAD_DIM)[h] = {peak[h], total[h]};
    }
  }

 private:
  // A lane's channels of a row, of which memory nobody wrote is none.
  static KVRT_INLINE void read(float (&to)[EACH], i64 row) {
    const u32* pairs = reinterpret_cast<const u32*>(row) + threadIdx.x % WARP * (EACH / 2);
#pragma unroll
    for (int c = 0; c < EACH; c += 2) {
#if EXACT_KIND == 2
      const float2 x = ptx::unpack_bfloat(pairs[c / 2]);
#else
      const float2 x = ptx::unpack_half(pairs[c / 2]);
#endif
      to[c] = x.x;
      to[c + 1] = x.y;
    }
  }
  // Sixteen sums over the warp, for all lanes: each exchange halves how many a lane cares for.
  static KVRT_INLINE void sum_up(float (&x)[16]) {
    exchange<8>(x);
    exchange<4>(x);
    exchange<2>(x);
    exchange<1>(x);
    const float mine = x[0] + __shfl_xor_sync(ALL_LANES, x[0], 1);
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = __shfl_sync(ALL_LANES, mine, 2 * i);
  }
  template <int COUNT>
  static KVRT_INLINE void exchange(float (&x)[16]) {
    const bool upper = threadIdx.x & 2 * COUNT;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const float kept = upper ? x[i + COUNT] : x[i], sent = upper ? x[i] : x[i + COUNT];
      x[i] = kept + __shfl_xor_sync(ALL_LANES, sent, 2 * COUNT);
    }
  }
};

// state (of one split) = what the warps have written, ExactState::FLOATS each. By all threads, after a barrier.
KVRT_INLINE void merge_exact(float* state, const float* warps) {
  for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += THREADS) {
    const int h = i / HEAD_DIM;
    const float2* stats = reinterpret_cast<const float2*>(warps + HEADS * HEAD_DIM) + h;
    float peak = NOTHING, total = 0, sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) peak = fmaxf(peak, stats[w * (ExactState::FLOATS / 2)].x);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float2 own = stats[w * (ExactState::FLOATS / 2)];
      const float weight = ptx::exp2(own.x - peak);
      total += weight * own.y;
      sum += weight * warps[w * ExactState::FLOATS + i];
    }
    state[4 * HEADS + i] = sum;
    if (i % HEAD_DIM == 0) reinterpret_cast<float2*>(state)[HEADS + h] = {peak, total};
  }
}
