// How a group of a block of zones is quantised, and what that costs. Twin of kvrt/backends/cpu_zone_codes.py: scales,
// minima, codes and sums of errors have the same bits (compiled with -fmad=false).
#pragma once
#include "intq.cuh"

// The codes of levels, found without a division where that makes no difference.
struct Coder {
  float scale, minimum, inverse, top;

  KVRT_INLINE Coder() {}
  KVRT_INLINE explicit Coder(const Levels& levels)
      : scale(levels.scale),
        minimum(levels.minimum),
        inverse(levels.scale == 0.0f ? 0.0f : __fdiv_rn(1.0f, levels.scale)),
        top(float(levels.top)) {}

  // As Levels::nearest. Up to 256 the product is within 3.1e-5 of the quotient, and so rounded to the same integer
  // unless that is about half-way between two.
  KVRT_INLINE float nearest(float x) const {
    const float above = x - minimum, near = above * inverse;
    float level = rintf(near);
    if (fabsf(near - level) > 0.4999f && scale != 0.0f) level = rintf(__fdiv_rn(above, scale));
    level = level > 0.0f ? level : 0.0f;
    return level > top ? top : level;
  }
  KVRT_INLINE float squared_error(float x) const {
    const float rest = x - (nearest(x) * scale + minimum);
    return rest * rest;
  }
};

// The sum of (x - its level)^2 over a group.
KVRT_INLINE float squared_error(const Group& group, const Levels& levels) {
  const Coder coder(levels);
  float total = 0.0f;
#pragma unroll 4
  for (int k = 0; k < group.size; ++k) total += coder.squared_error(group.at(k));
  return total;
}

KVRT_INLINE float squares(const Group& group) {
  float total = 0.0f;
  for (int k = 0; k < group.size; ++k) {
    const float x = group.at(k);
    total += x * x;
  }
  return total;
}

// Levels of two bits over the whole range, or 15/16 ... 9/16 of it, whichever gives the smallest sum of squared errors,
// which `error` becomes; of equal ones the first.
KVRT_INLINE Levels fit_clipped(const Group& group, float& error) {
  constexpr int PARTS = 8, TOP = 3;
  float low = group.at(0), high = low;
  for (int k = 0; k < group.size; ++k) {
    const float x = group.at(k);
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  const bool number = low == low;  // a NaN has its own bits on each device
  const float middle = number ? (low + high) * 0.5f : low, half = number ? (high - low) * 0.5f : low;
  Coder coders[PARTS];
  float errors[PARTS];
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const float part = 1.0f - i / 16.0f;
    const float scale = rounded(number ? quotient(2.0f * part * half, 3.0f) : low, F16);
    const float minimum = rounded(number ? middle - part * half : low, F16);
    coders[i] = Coder(Levels{scale, minimum, TOP, true});
    errors[i] = 0.0f;
  }
  for (int k = 0; k < group.size; ++k) {
    const float x = group.at(k);
#pragma unroll
    for (int i = 0; i < PARTS; ++i) errors[i] += coders[i].squared_error(x);
  }
  Levels best{coders[0].scale, coders[0].minimum, TOP, true};
  error = errors[0];
#pragma unroll
  for (int i = 1; i < PARTS; ++i)
    if (errors[i] < error) {
      error = errors[i];
      best.scale = coders[i].scale;
      best.minimum = coders[i].minimum;
    }
  return best;
}
