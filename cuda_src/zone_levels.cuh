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
