// Steps of a unit from one width to a higher one, and the lower convex hull that the best of them make. Twin of
// kvrt/trizone/allocator.py: the same numbers, in the same order, with the same bits.
#pragma once
#include "common.cuh"

static constexpr int MOST_WIDTHS = 5, PAIRS = MOST_WIDTHS * (MOST_WIDTHS - 1) / 2;
static constexpr float LARGEST = 3e38f;  // stands for all larger distortions
static constexpr i64 MOST_UNITS = i64(1) << 27;   // of a group
static constexpr u32 LARGEST_SLOPE = 0x7F800000;  // above the bits of all slopes

// What one group is allowed: a row of kvrt/backends/cuda_allocate.py. Rates behind the last width are 0, so that no
// step goes there.
struct Terms {
  i64 rates[MOST_WIDTHS];
  i64 budget;
  i64 cut;    // of the key of a step, as far as it is found: steps below it are taken
  i64 spent;  // by them
};

// The number of a step: (0, 1), (0, 2), ..., (1, 2), ...
KVRT_INLINE constexpr int pair_of(int from, int to) { return from * (2 * MOST_WIDTHS - from - 3) / 2 + to - 1; }

// What steps cost; one of a block of threads.
struct Prices {
  i64 rises[PAIRS];
  float prices[PAIRS];  // where a step costs nothing, infinite: its slope is 0, as if it gained nothing
  u8 to[PAIRS];

  // By all threads, of which there are PAIRS at least; they must wait for each other before it is read.
  KVRT_INLINE void read(const Terms& terms) {
    for (int from = 0, pair = 0; from < MOST_WIDTHS; ++from)
      for (int j = from + 1; j < MOST_WIDTHS; ++j, ++pair)
        if (int(threadIdx.x) == pair) {
          rises[pair] = terms.rates[j] - terms.rates[from];
          prices[pair] = rises[pair] > 0 ? float(rises[pair]) : __uint_as_float(0x7F800000);
          to[pair] = u8(j);
        }
  }
};

// What each width leaves of a unit.
struct Unit {
  float left[MOST_WIDTHS];

  // distortion: of the first width; that of the next is `stride` numbers on.
  KVRT_INLINE Unit(const float* distortion, int widths, i64 stride) {
    bool broken = false;
#pragma unroll
    for (int w = 0; w < MOST_WIDTHS; ++w) {
      const float x = w < widths ? distortion[w * stride] : LARGEST;
      broken |= x != x;
      left[w] = x > 0.0f ? x < LARGEST ? x : LARGEST : 0.0f;
    }
#pragma unroll
    for (int w = 0; w < MOST_WIDTHS; ++w) left[w] = broken ? 0.0f : left[w];
  }

  KVRT_INLINE float slope(int from, int to, const Prices& prices) const {
    return __fdiv_rn(left[from] - left[to], prices.prices[pair_of(from, to)]);
  }

  // take(from, to, slope) for each step of the hull, in order. Slopes do not rise, whatever rounding does.
  template <class Take>
  KVRT_INLINE void walk(const Prices& prices, const Take& take) const {
    int at = 0;
    float bound = LARGEST;
#pragma unroll
    for (int from = 0; from < MOST_WIDTHS - 1; ++from) {
      if (from != at) continue;
      float best = 0.0f;
#pragma unroll
      for (int to = from + 1; to < MOST_WIDTHS; ++to) {  // of equal slopes the nearest width
        const float here = slope(from, to, prices);
        if (here > best) {
          best = here;
          at = to;
        }
      }
      if (at == from) return;
      bound = best < bound ? best : bound;
      take(from, at, bound);
    }
  }
};

// The key of a step. From the highest bits: largest f32 - slope (31 bits), unit (low - 2), the width it leaves (2).
KVRT_INLINE i64 step_key(float slope, i64 unit, int from, int low) {
  return i64(LARGEST_SLOPE - __float_as_uint(slope)) << low | unit << 2 | from;
}

// A step as a number that is larger, the better it is: of equal slopes the first unit's, and of its steps the first. 0
// if it gains nothing.
KVRT_INLINE u64 candidate(float slope, i64 unit, int pair) {
  return slope > 0.0f ? u64(__float_as_uint(slope)) << 32 | u64(MOST_UNITS - 1 - unit) << 4 | u64(15 - pair) : 0;
}
KVRT_INLINE i64 candidate_unit(u64 number) { return MOST_UNITS - 1 - i64(number >> 4 & (MOST_UNITS - 1)); }
KVRT_INLINE int candidate_pair(u64 number) { return 15 - int(number & 15); }
