// Uniform integers with a scale, and a minimum, for each group. Twin of kvrt/kvstore/codecs/intq.py.
#pragma once
#include "codec.cuh"

enum IntQMode { ASYM = 0, SYM = 1, HYBRID = 2 };

// How a side's groups lie in a tile: `size` numbers each, one plane of scales is (groups, outers).
struct Groups {
  int size, by_rows, by_token, is_value, outers, count;

  KVRT_INLINE Groups(const Part& part, int dim)
      : size(part.own(1)),
        by_rows(part.own(3)),
        by_token(part.is_value ? part.own(3) : !part.own(3)),
        is_value(part.is_value),
        outers(by_token ? PAGE_TOKENS : dim),
        count((by_token ? dim : PAGE_TOKENS) / size) {}

  KVRT_INLINE int outer_at(int place) const { return by_rows ? column_at(place, outers, is_value) : place; }
  KVRT_INLINE int place_at(int outer) const { return by_rows ? place_of(outer, outers, is_value) : outer; }
};

// The numbers of one group; k counts from its first.
struct Group {
  const Tile& tile;
  int by_token, outer, start, size;

  KVRT_INLINE float& at(int k) const { return by_token ? tile.at(outer, start + k) : tile.at(start + k, outer); }
};

struct Levels {
  float scale, minimum;
  int top;  // the largest code
  bool asym;

  // The code of x: the nearest level, ties to even, 0 where all levels are one (and for a NaN).
  KVRT_INLINE u32 nearest(float x) const {
    if (scale == 0.0f) return 0;
    const float level = rintf(__fdiv_rn(x - minimum, scale));
    return level > 0.0f ? u32(level > float(top) ? float(top) : level) : 0;
  }

  // The sum of |x - its level| over a group.
  KVRT_INLINE float error(const Group& group) const {
    float total = 0.0f;
    for (int k = 0; k < group.size; ++k) {
      const float x = group.at(k);
      total += fabsf(x - (float(nearest(x)) * scale + minimum));
    }
    return total;
  }
};

KVRT_INLINE Levels fit(const Group& group, int bits, int mode) {
  float low = group.at(0), high = low;
  for (int k = 0; k < group.size; ++k) {
    const float x = group.at(k);
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  const int top = (1 << (mode == HYBRID ? bits - 1 : bits)) - 1;
  const float range = low == low ? high - low : low;
  const Levels asym{rounded(quotient(range, float(top)), F16), rounded(low, F16), top, true};
  if (mode == ASYM) return asym;
  const int middle = (1 << (bits - 1)) - 1;
  const float step = rounded(quotient(-low > high ? -low : high, float(middle)), F16);
  const Levels sym{step, -float(middle) * step, 2 * middle, false};
  if (mode == HYBRID && asym.error(group) < sym.error(group)) return asym;
  return sym;
}

// norm: the factor of each channel of heads first, first + step, ...: sqrt(max |x|) over the page; 1 where all are 0.
KVRT_INLINE void intq_survey(const Part& part, const Source& source, int first, int step) {
  for (int head = first; head < source.heads; head += step)
    for (int c = threadIdx.x; c < source.dim; c += THREADS) {
      float peak = 0.0f;
      for (int t = 0; t < PAGE_TOKENS; ++t) {
        const float size = fabsf(source.at(head, t, c));
        peak = size > peak ? size : peak;
      }
      part.state()[head * source.dim + c] = peak > 0.0f ? __fsqrt_rn(peak) : 1.0f;
    }
}

// Write scales and minima; the codes replace the tile's numbers. One thread a group.
KVRT_INLINE void intq_encode(const Part& part, const Tile& tile) {
  const int bits = part.own(0), mode = part.own(2), norm = part.own(4), dim = tile.dim;
  if (norm) {
    const float* factors = part.state() + part.head * dim;
    each_number(dim, [&](int t, int c) { tile.at(t, c) = quotient(tile.at(t, c), factors[c]); });
    __syncthreads();
  }
  const Groups groups(part, dim);
  const int planes = groups.count * groups.outers;
  u16* scales = part.meta();
  for (int i = threadIdx.x; i < planes; i += THREADS) {
    const int outer = groups.outer_at(i % groups.outers);
    const Group group{tile, groups.by_token, outer, i / groups.outers * groups.size, groups.size};
    const Levels levels = fit(group, bits, mode);
    scales[i] = u16(half_bits(levels.scale) | (mode == HYBRID && levels.asym ? 0x8000 : 0));
    if (mode != SYM) scales[planes + i] = levels.asym ? half_bits(levels.minimum) : 0;
    for (int k = 0; k < group.size; ++k) group.at(k) = __uint_as_float(levels.nearest(group.at(k)));
  }
  __syncthreads();
  pack_codes(tile, bits, part.is_value, part.codes());
}

// A tile of codes becomes one of numbers, without norm's factors.
KVRT_INLINE void intq_decode(const Part& part, const Tile& tile) {
  const int bits = part.own(0), mode = part.own(2);
  unpack_codes(part.codes(), bits, part.is_value, tile);
  const Groups groups(part, tile.dim);
  const int planes = groups.count * groups.outers;
  const u16* scales = part.meta();
  const float middle = float((1 << (bits - 1)) - 1);
  each_number(tile.dim, [&](int t, int c) {
    const int outer = groups.by_token ? t : c, along = groups.by_token ? c : t;
    const int i = along / groups.size * groups.outers + groups.place_at(outer);
    const u16 stored = scales[i];
    const float scale = half_value(stored & 0x7FFF);
    const bool asym = mode == ASYM || (mode == HYBRID && stored >> 15);
    const float shift = asym ? half_value(scales[planes + i]) : -middle * scale;
    tile.at(t, c) = fmaf(float(tile.code(t, c)), scale, shift);
  });
}
