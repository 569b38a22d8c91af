// KVQuant's non-uniform integers and their outliers. Twin of kvrt/kvstore/codecs/nuq.py, which has the layouts.
#pragma once
#include "codec.cuh"

static constexpr u16 UNUSED = 0xFFFF;  // index of a slot that holds no outlier

struct Slot {
  u16 value, index;
};

// x, what is beyond f16 as its largest number, NaN as 0.
KVRT_INLINE float finite(float x) {
  x = x < LARGEST_HALF ? x : (x > 0.0f ? LARGEST_HALF : 0.0f);
  return x > -LARGEST_HALF ? x : -LARGEST_HALF;
}

// Where x is between the thresholds, -1 ... 1; 0 where they are one number.
KVRT_INLINE float threshold_place(float x, float centre, float half) {
  return half > 0.0f ? __fdiv_rn(x - centre, half) : 0.0f;
}

// The sum of a number over the threads before this one, and over all.
struct Prefix {
  u32 before, all;
};
KVRT_INLINE Prefix block_prefix(u32 x) {
  __shared__ u32 sums[THREADS / WARP];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  u32 inclusive = x;
  for (int by = 1; by < WARP; by *= 2) {
    const u32 other = __shfl_sync(ALL_LANES, inclusive, lane >= by ? lane - by : lane);
    if (lane >= by) inclusive += other;
  }
  if (lane == WARP - 1) sums[warp] = inclusive;
  __syncthreads();
  Prefix result{inclusive - x, 0};
  for (int i = 0; i < THREADS / WARP; ++i) {
    if (i < warp) result.before += sums[i];
    result.all += sums[i];
  }
  __syncthreads();
  return result;
}

// Fill slots with the keys farthest outside, those of the lower index in a tie, by growing index. `tile` holds places.
KVRT_INLINE void keep_keys(const Tile& tile, const Source& source, int head, Slot* kept, u32 slots) {
  // A thread has a quarter of a token. Sizes are compared as bits: they are positive.
  const int quarter = tile.dim / (THREADS / PAGE_TOKENS), t = threadIdx.x * PAGE_TOKENS / THREADS;
  const int start = threadIdx.x % (THREADS / PAGE_TOKENS) * quarter;
  auto size = [&](int c) { return __float_as_uint(fabsf(tile.at(t, c))); };
  auto count = [&](u32 limit) {  // NaNs do not count
    u32 n = 0;
    for (int c = start; c < start + quarter; ++c) n += size(c) >= limit && size(c) <= 0x7F800000u;
    return n;
  };
  // Sizes from `limit` on may be kept; `limit` itself as long as there is room.
  u32 limit = 0x3F800001u;  // above 1
  if (block_prefix(count(limit)).all > slots)
    for (u32 above = 0x7F800001u; above - limit > 1;) {
      const u32 middle = limit + (above - limit) / 2;
      if (block_prefix(count(middle)).all >= slots)
        limit = middle;
      else
        above = middle;
    }
  const u32 larger = count(limit + 1), equal = count(limit) - larger;
  const Prefix larger_ones = block_prefix(larger), equal_ones = block_prefix(equal);
  const u32 room = slots - larger_ones.all;
  u32 equals = equal_ones.before;
  u32 slot = larger_ones.before + (equals < room ? equals : room);
  for (int c = start; c < start + quarter; ++c) {
    const u32 bits = size(c);
    if (bits < limit || bits > 0x7F800000u || (bits == limit && equals++ >= room)) continue;
    kept[slot++] = {half_bits(finite(source.at(head, t, c))), u16(t * tile.dim + c)};
  }
  const u32 used = larger_ones.all + (equal_ones.all < room ? equal_ones.all : room);
  for (u32 i = used + threadIdx.x; i < slots; i += THREADS) kept[i] = {0, UNUSED};
}

KVRT_INLINE void nuq_encode(const Part& part, const Source& source, const Tile& tile) {
  const int bits = part.own(0), slots = part.own(1), levels = 1 << bits, dim = tile.dim;
  if (part.is_value) {
    const u16* planes = reinterpret_cast<const u16*>(part.shared);
    each_number(dim, [&](int t, int c) {
      const int place = place_of(t, PAGE_TOKENS, 1);
      const float centre = half_value(planes[place]), half = half_value(planes[PAGE_TOKENS + place]);
      tile.at(t, c) = threshold_place(finite(tile.at(t, c)), centre, half);
    });
  } else {
    const float* centres = part.table() + 2 * levels + part.head * dim;
    const float* halves = centres + part.heads * dim;
    each_number(dim, [&](int t, int c) {
      tile.at(t, c) = threshold_place(finite(tile.at(t, c)), centres[c], halves[c]);
    });
    __syncthreads();
    if (slots > 0) keep_keys(tile, source, part.head, reinterpret_cast<Slot*>(part.meta()), slots);
    __syncthreads();
  }
  const float* boundaries = part.table() + levels;
  each_number(dim, [&](int t, int c) {
    const float x = tile.at(t, c);
    u32 below = 0;
    for (int i = 0; i < levels - 1; ++i) below += x > boundaries[i];
    tile.set_code(t, c, below);
  });
  __syncthreads();
  pack_codes(tile, bits, part.is_value, part.codes());
}

struct Ranked {
  float x;
  int index;
};

// The number of a token that follows `last` in falling order of sign * x, equal ones by index. One warp.
KVRT_INLINE Ranked next_value(const Source& source, int t, float sign, Ranked last) {
  const int lane = threadIdx.x % WARP;
  Ranked best{0.0f, -1};
  for (int head = 0; head < source.heads; ++head)
    for (int c = lane; c < source.dim; c += WARP) {
      const Ranked it{sign * finite(source.at(head, t, c)), head * source.dim + c};
      const bool follows = it.x < last.x || (it.x == last.x && it.index > last.index);
      if (follows && (best.index < 0 || it.x > best.x)) best = it;
    }
  for (int mask = WARP / 2; mask; mask /= 2) {
    const Ranked other{__shfl_xor_sync(ALL_LANES, best.x, mask), __shfl_xor_sync(ALL_LANES, best.index, mask)};
    const bool before = other.x > best.x || (other.x == best.x && other.index < best.index);
    if (other.index >= 0 && (best.index < 0 || before)) best = other;
  }
  return best;
}

// Fill slots with the largest of a token by sign * x; give the one behind them. One warp.
KVRT_INLINE float keep_values(const Source& source, int t, float sign, Slot* kept, int slots) {
  Ranked it = next_value(source, t, sign, {__uint_as_float(0x7F800000u), -1});
  for (int slot = 0; slot < slots; ++slot) {
    if (threadIdx.x % WARP == 0) kept[slot] = {half_bits(sign * it.x), u16(it.index)};
    it = next_value(source, t, sign, it);
  }
  return sign * it.x;
}

// Thresholds and outliers of the values of tokens first, first + step, ..., in order of place. One warp a token.
KVRT_INLINE void nuq_survey(const Part& part, const Source& source, int first, int step) {
  if (!part.is_value) return;
  const int slots = part.own(1);
  u16* planes = reinterpret_cast<u16*>(part.shared);
  Slot* kept = reinterpret_cast<Slot*>(part.shared + 4 * PAGE_TOKENS);
  for (int place = first; place < PAGE_TOKENS; place += step) {
    const int t = column_at(place, PAGE_TOKENS, 1);
    const float high = keep_values(source, t, 1.0f, kept + t * 2 * slots, slots);
    const float low = keep_values(source, t, -1.0f, kept + (t * 2 + 1) * slots, slots);
    if (threadIdx.x % WARP == 0) {
      planes[place] = half_bits((high + low) * 0.5f);
      planes[PAGE_TOKENS + place] = half_bits((high - low) * 0.5f);
    }
  }
}

// A tile of codes becomes one of numbers, outliers and all.
KVRT_INLINE void nuq_decode(const Part& part, const Tile& tile) {
  const int bits = part.own(0), slots = part.own(1), levels = 1 << bits, dim = tile.dim;
  const float* read_levels = part.table();
  unpack_codes(part.codes(), bits, part.is_value, tile);
  if (part.is_value) {
    const u16* planes = reinterpret_cast<const u16*>(part.shared);
    each_number(dim, [&](int t, int c) {
      const int place = place_of(t, PAGE_TOKENS, 1);
      const float centre = half_value(planes[place]), half = half_value(planes[PAGE_TOKENS + place]);
      tile.at(t, c) = fmaf(read_levels[tile.code(t, c)], half, centre);
    });
    __syncthreads();
    const Slot* kept = reinterpret_cast<const Slot*>(part.shared + 4 * PAGE_TOKENS);
    for (int i = threadIdx.x; i < PAGE_TOKENS * 2 * slots; i += THREADS) {
      const int c = int(kept[i].index) - part.head * dim;
      if (c >= 0 && c < dim) tile.at(i / (2 * slots), c) = half_value(kept[i].value);
    }
  } else {
    const float* centres = part.table() + 2 * levels + part.head * dim;
    const float* halves = centres + part.heads * dim;
    each_number(dim, [&](int t, int c) {
      tile.at(t, c) = fmaf(read_levels[tile.code(t, c)], halves[c], centres[c]);
    });
    __syncthreads();
    const Slot* kept = reinterpret_cast<const Slot*>(part.meta());
    for (int i = threadIdx.x; i < slots; i += THREADS) {
      const int index = kept[i].index;
      if (index < PAGE_TOKENS * dim) tile.at(index / dim, index % dim) = half_value(kept[i].value);
    }
  }
}
