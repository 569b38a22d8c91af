// The running softmax of a warp over units of zones (Milakov and Gimelshein 2018), and its weighted sums of values.
#pragma once
#include "zone_unit.cuh"

// Sums of values: a lane has, of chunk k and tile m, NEAR neighbours, 2 m and 2 m + 1 of them in tile m, in the columns
// of its scores; lanes of other groups of four have others of a chunk.
static constexpr int NEAR = HEAD_DIM > 64 ? 16 : 8, CHUNK = 8 * NEAR, CHUNKS = (HEAD_DIM + CHUNK - 1) / CHUNK;

// The running softmax of a warp, of the columns that a lane has.
struct Softmax {
  float peak[2] = {NOTHING, NOTHING}, total[2] = {0, 0};
  float minimum[2] = {0, 0};  // what minima of values add to all channels; this and total are the lane's part
  float sums[CHUNKS][NEAR / 2][4] = {};
  int unit = HALVES;  // sums are times two to the power of it
  bool empty = true;  // whether sums are zeros

  // Take up the tokens first ... of a unit (below first + WARP_TOKENS and counts.total()), at least one. Values, and
  // scales and minima of those that are coded, are at `values` and `meta`.
  KVRT_INLINE void step(float (&scores)[2][4], const Counts& counts, int first, const u8* values, const u8* meta,
                        Weights<WARP_TOKENS>& weights, int lane) {
    const int halves = counts.of(0);
    const int last = min(counts.total(), first + WARP_TOKENS), own = first + lane / 4 * 4;
    // All is read before any is written: the compiler does not know that these are other places.
    const u32* levels = reinterpret_cast<const u32*>(meta) - halves;
    const int token = first + lane;
    u32 words[4], scale = token >= halves && token < last ? levels[token] & 0xFFFF : 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) words[n] = own + n >= halves && own + n < last ? levels[own + n] : 0;
    const int exponent = HALVES - exponent_of(__reduce_max_sync(ALL_LANES, scale));
    float top[2] = {peak[0], peak[1]}, shrink[2];
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& score = scores[n / 2][n % 2 * 2 + h];
        if (own + n >= last) score = NOTHING;
        top[h] = fmaxf(top[h], score);
      }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int d = 4; d < WARP; d *= 2) top[h] = fmaxf(top[h], __shfl_xor_sync(ALL_LANES, top[h], d));
      shrink[h] = ptx::exp2(peak[h] - top[h]);
      peak[h] = top[h];
      total[h] *= shrink[h];
      minimum[h] *= shrink[h];
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float2 level = ptx::unpack_half(words[n]);
      level.x = own + n < halves ? power(HALVES) : level.x * power(exponent);
      float x[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float weight = ptx::exp2(scores[n / 2][n % 2 * 2 + h] - peak[h]);
        total[h] += weight;
        minimum[h] = fmaf(weight, level.y, minimum[h]);
        x[h] = weight * level.x;
      }
      weights.put_pair(row_of(lane / 4 * 4 + n), lane % 4, x[0], x[1]);
    }
    __syncwarp();

    int end = 0;
    if (first < halves) rescale(shrink, HALVES);
    add_rows<16>(values, end, halves, first, last, weights, lane);
    if (last > halves) {
      if (first < halves) shrink[0] = shrink[1] = 1.0f;
      rescale(shrink, exponent - 24);
    }
    add_rows<8>(values, end, counts.of(1), first, last, weights, lane);
    add_rows<4>(values, end, counts.of(2), first, last, weights, lane);
    add_rows<2>(values, end, counts.of(3), first, last, weights, lane);
  }

  // Hand the state over: stats (HEADS,) = maximum, sum of weights, what minima add, and what to multiply sums by; parts
  // (HEADS, HEAD_DIM) = sums, `pitch` for a head, of which `slot_of` says what is where.
  KVRT_INLINE void write(float4* stats, float* parts, int pitch) {
    const int lane = threadIdx.x % WARP, group = lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int d = 4; d < WARP; d *= 2) {
        total[h] += __shfl_xor_sync(ALL_LANES, total[h], d);
        minimum[h] += __shfl_xor_sync(ALL_LANES, minimum[h], d);
      }
    // Of four heads each lane adds up halves and rests of one.
    const bool second = HEADS == 4 && lane & 2;
    const int head = HEADS == 4 ? lane % 2 * 2 + second : lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < (HEADS == 4 ? 1 : 2); ++h)
      if (group == 0)
        stats[head + h] = {second ? peak[1] : peak[h], second ? total[1] : total[h], second ? minimum[1] : minimum[h],
                           power(-unit)};
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k)
#pragma unroll
      for (int m = 0; m < NEAR / 2; ++m) {
        const float(&x)[4] = sums[k][m];
        const int slot = slot_of((k * CHUNK + group * NEAR) / 2 + m);
        const bool there = k * CHUNK + group * NEAR < HEAD_DIM;
        if (HEADS == 4) {
          const float low = __shfl_xor_sync(ALL_LANES, second ? x[0] : x[1], 2) + (second ? x[1] : x[0]);
          const float high = __shfl_xor_sync(ALL_LANES, second ? x[2] : x[3], 2) + (second ? x[3] : x[2]);
          if (there) reinterpret_cast<float2*>(parts + head * pitch)[slot] = {low, high};
        } else if (there) {
          reinterpret_cast<float2*>(parts + head * pitch)[slot] = {x[0], x[2]};
          reinterpret_cast<float2*>(parts + (head + 1) * pitch)[slot] = {x[1], x[3]};
        }
      }
  }
  // Where a pair of channels is in what is handed over: turned by lanes, which write to all banks so.
  static KVRT_INLINE int slot_of(int pair) {
    constexpr int EACH = NEAR / 2;
    return pair / EACH * EACH + ((pair + pair / EACH) & (EACH - 1));
  }

 private:
  // Those of the tokens of one width that are among first ... last - 1; there are `count` from number `end` on.
  template <int WIDTH>
  KVRT_INLINE void add_rows(const u8*& values, int& end, int count, int first, int last,
                            const Weights<WARP_TOKENS>& weights, int lane) {
    constexpr int PITCH = HEAD_DIM * WIDTH / 8;
    const int begin = max(end, first), behind = min(end + count, last);
    const u8* lines = values + (begin - end) * PITCH + lane / 4 * (NEAR * WIDTH / 8);
    add_lines<WIDTH, NEAR, CHUNK>(sums, lines, PITCH, begin - first, behind - first, weights, row_of, lane);
    end += count;
    values += count * PITCH;
  }

  // Where the weights of token t are: so that eight lanes write to all banks.
  static KVRT_INLINE int row_of(int t) { return t ^ (t >> 3 & 3); }

  // Bring sums to another unit.
  KVRT_INLINE void rescale(const float (&factor)[2], int to) {
    if (empty) {
      unit = to;
      empty = false;
      return;
    }
    const float both[2] = {factor[0] * power(to - unit), factor[1] * power(to - unit)};
    unit = to;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k)
#pragma unroll
      for (int m = 0; m < NEAR / 2; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[k][m][i] *= both[i % 2];
  }
};
