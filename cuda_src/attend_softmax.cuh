// The running softmax of a warp, and how warps and splits become one. WARPS is that of a CTA.
#pragma once
#include "attend_merge.cuh"
#include "attend_values.cuh"

// The largest weight is 2^WEIGHT_BITS when the maximum is taken, so that small ones are not lost as halves. It may grow
// until a lane's weights of a page sum up to MOST_WEIGHT: products of weights with scales up to 255 are halves
// (weights up to 256; 16 where values are non-uniform integers, whose halves may be thousands, or with MORE_LOW).
#if K_KIND == 2
static constexpr float WEIGHT_BITS = -3.0f, MOST_WEIGHT = 2.0f;
#else
static constexpr bool SMALL_WEIGHTS = V_CODEC == 4 || MORE_LOW > 1;
static constexpr float WEIGHT_BITS = SMALL_WEIGHTS ? 0.0f : 4.0f, MOST_WEIGHT = SMALL_WEIGHTS ? 16.0f : 256.0f;
#endif

// Weights of COUNT tiles of 16 tokens: as they are, and as two halves or bf16 of the query heads 2 (lane % 4) and the
// next, of the rows lane / 4 and 8 further.
template <int COUNT>
struct Weighted {
  float weights[COUNT][4];
  u32 rows[COUNT][2];
};

// The running softmax of the query heads 2 (lane % 4) and the next.
struct Softmax {
  float peak[2] = {NOTHING, NOTHING}, total[2] = {0, 0};  // peak: a score that was the maximum at some time
  float sums[TILES][4] = {}, minima[2][4] = {};

  // Take up COUNT tiles of scores (once `affine` is applied, times `unscale`, powers of two), of which the tokens
  // low ... count - 1 are seen, at least one.
  template <int COUNT>
  KVRT_INLINE void step(Weighted<COUNT>& to, float (&scores)[COUNT][4], Affine<COUNT> affine,
                        const float (&unscale)[2], int low, int count) {
    if (low > 0 || count < 16 * COUNT) {
      __syncwarp();  // so that this is a branch, and no selections by each page
      const int row = threadIdx.x % WARP / 4;
#pragma unroll
      for (int j = 0; j < COUNT; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = 16 * j + 8 * (i >> 1) + row;
          if (token < low || token >= count) scores[j][i] = NOTHING;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) affine.factor[i] *= unscale[i & 1];
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) affine.shift[j][h] *= unscale[h];
    // The softmax is right with any peak. So a maximum, for which lanes wait for each other, is taken only where
    // weights have become too large: for the first scores, and rarely afterwards.
    weigh(to, scores, affine);
    if (__any_sync(ALL_LANES, too_large(to))) {
      affine.apply(scores);
      raise(scores);
      weigh(to, scores, affine);
    }
    if (!TOTAL_IN_TILE)
#pragma unroll
      for (int j = 0; j < COUNT; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i & 1] += to.weights[j][i];
  }

 private:
  template <int COUNT>
  KVRT_INLINE void weigh(Weighted<COUNT>& to, const float (&scores)[COUNT][4], const Affine<COUNT>& affine) const {
    const float base[2] = {WEIGHT_BITS - peak[0], WEIGHT_BITS - peak[1]};
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      const float shift[2] = {base[0] + affine.shift[j][0], base[1] + affine.shift[j][1]};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        to.weights[j][i] = ptx::exp2(fmaf(scores[j][i], affine.factor[i], shift[i & 1]));
#pragma unroll
      for (int r = 0; r < 2; ++r)
#if K_KIND == 2
        to.rows[j][r] = ptx::pack_bfloat(to.weights[j][2 * r], to.weights[j][2 * r + 1]);
#else
        to.rows[j][r] = ptx::pack_half(to.weights[j][2 * r], to.weights[j][2 * r + 1]);
#endif
    }
  }

  // Whether a lane has weights that sum up to MOST_WEIGHT, infinity or NaN (bf16: one of that size).
  template <int COUNT>
  static KVRT_INLINE bool too_large(const Weighted<COUNT>& all) {
    u32 sum[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
#if K_KIND == 2
      sum[j] = all.rows[j][0] | all.rows[j][1];
#else
      sum[j] = ptx::add_half2(all.rows[j][0], all.rows[j][1]);
#endif
#pragma unroll
    for (int n = COUNT / 2; n > 0; n /= 2)
#pragma unroll
      for (int j = 0; j < n; ++j)
#if K_KIND == 2
        sum[j] |= sum[j + n];
#else
        sum[j] = ptx::add_half2(sum[j], sum[j + n]);
#endif
    // What is 2 or more has the first bit of its exponent.
    return (scale_half2(sum[0], 2.0f / MOST_WEIGHT) & 0x40004000u) != 0;
  }

  // Take the maximum of what came before and of these scores.
  template <int COUNT>
  KVRT_INLINE void raise(const float (&scores)[COUNT][4]) {
    // A NaN among the scores is no maximum, but it makes its weight a NaN.
    float top[2] = {fmaxf(scores[0][0], scores[0][2]), fmaxf(scores[0][1], scores[0][3])};
#pragma unroll
    for (int j = 1; j < COUNT; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) top[i & 1] = fmaxf(top[i & 1], scores[j][i]);
    float shrink[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int d = 4; d < WARP; d *= 2) top[h] = fmaxf(top[h], __shfl_xor_sync(ALL_LANES, top[h], d));
      top[h] = fmaxf(top[h], peak[h]);
      shrink[h] = ptx::exp2(peak[h] - top[h]);
      total[h] *= shrink[h];
      peak[h] = top[h];
    }
#pragma unroll
    for (int s = 0; s < TILES; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[s][i] *= shrink[i & 1];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      minima[0][h] *= shrink[h];
      minima[1][2 + h] *= shrink[h];
    }
  }
};

// A warp's state of up to 8 query heads in shared memory: weighted values (8, PITCH), maximum and total (8, 2).
static constexpr int PITCH = HEAD_DIM + 4;  // no two heads of a lane's column in one bank
static constexpr int STATE_FLOATS = 8 * PITCH + 16;

KVRT_INLINE void write_state(float* place, Softmax& state, int heads) {
  const int lane = threadIdx.x % WARP, row = lane / 4, col = lane % 4;
#pragma unroll
  for (int s = 0; s < TILES; ++s)
#pragma unroll
    for (int i = 0; i < 4; ++i) state.sums[s][i] *= unit_of_sums(i);
#if (V_CODEC == 1 || V_CODEC == 2) && V_BY_ROWS
  // Row g of the tiles of minima belongs to all channels of group g.
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float mine = state.minima[0][h] + state.minima[1][2 + h];
    if (TOTAL_IN_TILE) state.total[h] = __shfl_sync(ALL_LANES, mine, 7 * 4 + col);
#pragma unroll
    for (int s = 0; s < TILES; ++s) {
      const float shift = __shfl_sync(ALL_LANES, mine, 16 * s / V_GROUP * 4 + col);
      state.sums[s][h] += shift;
      state.sums[s][2 + h] += shift;
    }
  }
#endif
#if V_CODEC == 4 && V_SLOTS == 0
#pragma unroll
  for (int s = 0; s < TILES; ++s)
#pragma unroll
    for (int i = 0; i < 4; ++i) state.sums[s][i] += state.minima[0][i & 1];
#endif
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (!TOTAL_IN_TILE)
#pragma unroll
      for (int d = 4; d < WARP; d *= 2) state.total[h] += __shfl_xor_sync(ALL_LANES, state.total[h], d);
    const int head = 2 * col + h;
    if (head >= heads) continue;
    if (row == 0) {
      place[8 * PITCH + 2 * head] = state.peak[h];
      place[8 * PITCH + 2 * head + 1] = state.total[h];
    }
#pragma unroll
    for (int s = 0; s < TILES; ++s) {
      place[head * PITCH + 16 * s + row] = state.sums[s][h];
      place[head * PITCH + 16 * s + 8 + row] = state.sums[s][2 + h];
    }
  }
}

// Of head h, what the CTA's warps wrote, `stride` floats from one to the next.
KVRT_INLINE void merge_warps(HeadState& merged, const float* states, int stride, int h) {
  const int lane = threadIdx.x % WARP;
  float2 mine = {NOTHING, 0};
  if (lane < WARPS) mine = *reinterpret_cast<const float2*>(states + lane * stride + 8 * PITCH + 2 * h);
  const float weight = merged.take(mine.x, mine.y);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const float factor = __shfl_sync(ALL_LANES, weight, w);
#pragma unroll
    for (int i = 0; i < PARTS; ++i)
      if (lane + WARP * i < QUARTERS)
        merged.add(i, reinterpret_cast<const float4*>(states + w * stride + h * PITCH)[lane + WARP * i], factor);
  }
}

// out (HEAD_DIM,) f32 = the values' mean, turned back by the Hadamard transform of blocks of V_HADAMARD channels.
KVRT_INLINE void finish(HeadState& state, float* out) {
  const int lane = threadIdx.x % WARP;
  float x[PARTS][4];
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const float norm = V_HADAMARD > 0 ? rsqrtf(float(V_HADAMARD)) : 1.0f;
    const float factor = norm / state.total;
    x[i][0] = state.sums[i].x * factor;
    x[i][1] = state.sums[i].y * factor;
    x[i][2] = state.sums[i].z * factor;
    x[i][3] = state.sums[i].w * factor;
    if (V_HADAMARD >= 2) {
      butterfly(x[i][0], x[i][1]);
      butterfly(x[i][2], x[i][3]);
    }
    if (V_HADAMARD >= 4) {
      butterfly(x[i][0], x[i][2]);
      butterfly(x[i][1], x[i][3]);
    }
#pragma unroll
    for (int bit = 1; bit < WARP; bit *= 2)
      if (V_HADAMARD >= 8 * bit)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float other = __shfl_xor_sync(ALL_LANES, x[i][n], bit);
          x[i][n] = lane & bit ? other - x[i][n] : x[i][n] + other;
        }
  }
  if (V_HADAMARD > 128)
#pragma unroll
    for (int n = 0; n < 4; ++n) butterfly(x[0][n], x[PARTS - 1][n]);
#pragma unroll
  for (int i = 0; i < PARTS; ++i)
    if (lane + WARP * i < QUARTERS)
      *reinterpret_cast<float4*>(out + 4 * (lane + WARP * i)) = {x[i][0], x[i][1], x[i][2], x[i][3]};
}
