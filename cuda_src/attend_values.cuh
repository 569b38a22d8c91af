// Weighted sums of the 64 values of a sealed page: values, transposed, are A (channels are M), weights are B.
//
// sums[s] is a 16 x 8 tile of the channels 16 s ... 16 s + 15 and the query heads, laid out as scores are.
#pragma once
#include "attend_keys.cuh"

// The weights of 64 tokens as B fragments: low, high are tokens 16 j + 2 (lane % 4) + {0, 1} and 8 further.
struct Weights {
  u32 low[4], high[4];
};

#if V_CODEC == 1 || V_CODEC == 2
static constexpr int V_GROUPS = (V_BY_ROWS ? HEAD_DIM : 64) / V_GROUP;
static constexpr int V_MIDDLE = V_CODEC == 2 ? 1 << (V_BITS - 1) : (1 << (V_BITS - 1)) - 1;
static constexpr bool V_MINIMA = V_CODEC == 1 && V_MODE != 1;
static constexpr bool V_CENTRED = V_CODEC == 2 || V_MODE != 0;
// Whether sums are those of the codes as they are, for as long as they are not written.
static constexpr bool V_RAW = V_BY_ROWS;
// How much more low tokens of a k-step weigh: codes of high ones have that factor already.
static constexpr float MORE_LOW = V_RAW ? Codes<V_BITS>::HIGH_COLUMNS : 1.0f;
// Whether rows of minima that no group wants are the sums of all weights.
static constexpr bool TOTAL_IN_TILE = V_BY_ROWS && V_MINIMA && V_GROUPS < 8;
#else
static constexpr bool V_RAW = false, TOTAL_IN_TILE = false;
static constexpr float MORE_LOW = 1.0f;
#endif

// Two minima of a row that is no group.
KVRT_INLINE u32 unwanted_minimum() { return TOTAL_IN_TILE ? ONES : 0; }

// What a unit of the sums i of a tile is.
KVRT_INLINE float unit_of_sums(int i) {
#if V_CODEC == 1 || V_CODEC == 2
  if (V_RAW) return FROM_SUBNORMAL / MORE_LOW / (i < 2 ? 1.0f : Codes<V_BITS>::HIGH_ROWS);
#endif
  return 1.0f;
}

#if V_CODEC == 1 || V_CODEC == 2

// sum += codes of tile s * B over the token tiles FIRST ... FIRST + COUNT - 1, B as it is for each of them.
template <int FIRST, int COUNT>
KVRT_INLINE void add_codes(float (&sum)[4], const u8* codes, int s, const u32 (&low)[4], const u32 (&high)[4]) {
  Codes<V_BITS> tiles;
  tiles.load(codes, s);
#pragma unroll
  for (int j = FIRST; j < FIRST + COUNT; ++j) {
    u32 a[4];
    tiles.tile(a, j, s);
    ptx::mma_half(sum, a[0], a[1], a[2], a[3], low[j], high[j]);
  }
}

// B as codes want it, times `more`.
KVRT_INLINE void weigh_columns(u32 (&low)[4], u32 (&high)[4], const Weights& weights, float more) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    low[j] = scale_half2(weights.low[j], low_columns<V_BITS>(j) * more);
    high[j] = scale_half2(weights.high[j], high_columns<V_BITS>(j) * more);
  }
}

#if V_BY_ROWS
// -middle as a field of a register, twice.
KVRT_INLINE u32 minus_middle(float weight) { return (0x8000u | u32(V_MIDDLE * weight)) * 0x10001u; }

// Scales go with tokens, so they go into the weights. Minima are rows of two more tiles, one for each group: rows
// 0 ... 7 of the first are those of the low tokens of a k-step, rows 8 ... 15 of the second those of the high ones. So
// registers need not be brought in order.
KVRT_INLINE void add_values_by_token(float (&sums)[TILES][4], float (&minima)[2][4], const u8* run,
                                     const Weights& weights) {
  const int row = threadIdx.x % WARP / 4, col = threadIdx.x % 4;
  const u8* codes = run + V_CODES_OFFSET;
  const uint2* scales = reinterpret_cast<const uint2*>(run + V_META_OFFSET);
  u32 more_low[4], more_high[4];
  weigh_columns(more_low, more_high, weights, MORE_LOW);
#pragma unroll
  for (int g = 0; g < V_GROUPS; ++g) {
    u32 low[4], high[4];
    float middle[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint2 scale = scales[g * 16 + 4 * j + col];
      const u32 low_sign = scale.x & 0x80008000u, high_sign = scale.y & 0x80008000u;
      if (V_MODE == 2) scale = {scale.x & 0x7FFF7FFFu, scale.y & 0x7FFF7FFFu};
      low[j] = ptx::mul_half2(more_low[j], scale.x);
      high[j] = ptx::mul_half2(more_high[j], scale.y);
      if (V_CENTRED) {
        u32 a[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          a[r] = minus_middle(Codes<V_BITS>::weight(r, j));
          if (V_MODE == 2) a[r] &= ~(((r < 2 ? low_sign : high_sign) >> 15) * 0xFFFFu);
        }
        ptx::mma_half(middle, a[0], a[1], a[2], a[3], low[j], high[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < V_GROUP / 16; ++i) {
      const int s = g * (V_GROUP / 16) + i;
      if (V_CENTRED)
#pragma unroll
        for (int n = 0; n < 4; ++n) sums[s][n] += middle[n];
      add_codes<0, 4>(sums[s], codes, s, low, high);
    }
  }
  if (V_MINIMA)
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      uint2 a = {unwanted_minimum(), unwanted_minimum()}, b = a;
      if (row < V_GROUPS) {
        a = scales[(V_GROUPS + row) * 16 + 4 * j + col];
        b = scales[(V_GROUPS + row) * 16 + 4 * j + 4 + col];
      }
      ptx::mma_half(minima[0], a.x, a.y, b.x, b.y, weights.low[j], weights.low[j + 1]);
      ptx::mma_half(minima[1], a.x, a.y, b.x, b.y, weights.high[j], weights.high[j + 1]);
    }
}
#else
// Scales go with channels, the rows of the sums, for each group of tokens.
KVRT_INLINE void add_values_by_channel(float (&sums)[TILES][4], const u8* run, const Weights& weights) {
  constexpr int TILES_A_GROUP = 4 / V_GROUPS;
  const int row = threadIdx.x % WARP / 4;
  const u8* codes = run + V_CODES_OFFSET;
  const u16* scales = reinterpret_cast<const u16*>(run + V_META_OFFSET);
  u32 low[4], high[4];
  weigh_columns(low, high, weights, 1.0f);
#pragma unroll
  for (int g = 0; g < V_GROUPS; ++g) {
    float total[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = g * TILES_A_GROUP; j < (g + 1) * TILES_A_GROUP; ++j)
      ptx::mma_half(total, ONES, ONES, ONES, ONES, weights.low[j], weights.high[j]);
#pragma unroll
    for (int s = 0; s < TILES; ++s) {
      float sum[4] = {0, 0, 0, 0};
      if (g == 0)
        add_codes<0, TILES_A_GROUP>(sum, codes, s, low, high);
      else
        add_codes<4 - TILES_A_GROUP, TILES_A_GROUP>(sum, codes, s, low, high);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int place = g * HEAD_DIM + 16 * s + 8 * r + row;
        const u16 bits = scales[place];
        const float scale = ptx::half_to_float(V_MODE == 2 ? bits & 0x7FFF : bits);
        const bool has_minimum = V_CODEC == 1 && (V_MODE == 0 || (V_MODE == 2 && bits >> 15));
        const float shift = has_minimum ? ptx::half_to_float(scales[V_GROUPS * HEAD_DIM + place]) : -V_MIDDLE * scale;
        const float factor = scale * (FROM_SUBNORMAL / (r ? Codes<V_BITS>::HIGH_ROWS : 1.0f));
        sums[s][2 * r] += sum[2 * r] * factor + total[0] * shift;
        sums[s][2 * r + 1] += sum[2 * r + 1] * factor + total[1] * shift;
      }
    }
  }
}
#endif
#endif

#if V_CODEC == 3
KVRT_INLINE void add_float_values(float (&sums)[TILES][4], const u8* run, const Weights& weights, float scale) {
  const float factor = scale * (V_E4M3 ? 256.0f : 1.0f);
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    Codes<8> codes;
    codes.load(run + V_CODES_OFFSET, s);
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 low[2], high[2];
      minifloats<V_E4M3>(low, word_of(codes.first, j));
      minifloats<V_E4M3>(high, word_of(codes.second, j));
      ptx::mma_half(sum, low[0], low[1], high[0], high[1], weights.low[j], weights.high[j]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[s][i] += sum[i] * factor;
  }
}
#endif

#if V_CODEC == 4
// Non-uniform integers: half and centre go with tokens, over all heads. Rows 0 ... 7 of the first tile of minima gather
// the centres.
KVRT_INLINE void add_level_values(float (&sums)[TILES][4], float (&minima)[2][4], const u8* run,
                                  const Weights& weights, const Tables& tables) {
  const Levels<V_BITS> levels(tables, true);
  const uint2* planes = reinterpret_cast<const uint2*>(run + RUN_BYTES) + threadIdx.x % 4;
  u32 low[4], high[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint2 centre = planes[4 * j], half = planes[16 + 4 * j];
    ptx::mma_half(minima[0], centre.x, 0, centre.y, 0, weights.low[j], weights.high[j]);
    low[j] = ptx::mul_half2(weights.low[j], half.x);
    high[j] = ptx::mul_half2(weights.high[j], half.y);
    if (levels.SWAPS) swap_columns(low[j], high[j]);
  }
  Codes<V_BITS> codes;
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    codes.load(run + V_CODES_OFFSET, s);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 a[4];
      levels.tile(a, tile_word(codes, j), s, true);
      ptx::mma_half(sums[s], a[0], a[1], a[2], a[3], low[j], high[j]);
    }
  }
}

#if V_SLOTS > 0
// The same where some are kept exact: numbers are made first, and exact ones put between them, 16 tokens after 16.
KVRT_INLINE void add_values_with_outliers(float (&sums)[TILES][4], u8* run, const Weights& weights,
                                          const Tables& tables, int head) {
  constexpr int GROUP = ValueOutliers::GROUP;
  const Levels<V_BITS> levels(tables, true);
  const uint2* planes = reinterpret_cast<const uint2*>(run + RUN_BYTES) + threadIdx.x % 4;
  ValueOutliers outliers(run, VALUES_IN_PLACE_OF_KEYS ? run : tables.room(), head, levels.SWAPS);
  Weights rest = weights;
  __syncwarp();  // keys are no longer read
#pragma unroll 2
  for (int j = 0; j < 4; ++j) {
    uint2 centre = planes[4 * j], half = planes[16 + 4 * j], weight = {rest.low[0], rest.high[0]};
    if (levels.SWAPS) {
      swap_columns(centre.x, centre.y);
      swap_columns(half.x, half.y);
      swap_columns(weight.x, weight.y);
    }
    outliers.take(j);
    u32 words[TILES];
    tile_words<V_BITS>(words, run + V_CODES_OFFSET, j);
#pragma unroll
    for (int first = 0; first < TILES; first += GROUP) {
      const int count = TILES - first < GROUP ? TILES - first : GROUP;
      u32 a[GROUP][4];  // no load goes ahead of what is written
#pragma unroll
      for (int i = 0; i < count; ++i) {
        levels.tile(a[i], words[first + i], first + i, true);
        make_numbers(a[i], half.x, half.y, centre.x, centre.y);
      }
      write_with_outliers(a, outliers, first, count);
#pragma unroll
      for (int i = 0; i < count; ++i) {
        u32(&x)[4] = a[i];
        read_tile(x, outliers.room + i * TILE_BYTES);
        ptx::mma_half(sums[first + i], x[0], x[1], x[2], x[3], weight.x, weight.y);
      }
    }
#pragma unroll
    for (int n = 0; n < 3; ++n) {
      rest.low[n] = rest.low[n + 1];
      rest.high[n] = rest.high[n + 1];
    }
  }
}
#endif
#endif

// sums += weights * values of a page; `minima` gathers what belongs to all channels of a group of them; `scale` is that
// of the head (fp8). The keys in the run may be overwritten.
KVRT_INLINE void add_page_values(float (&sums)[TILES][4], float (&minima)[2][4], u8* run, const Weights& weights,
                                 const Tables& tables, float scale, int head) {
#if V_CODEC == 4 && V_SLOTS > 0
  add_values_with_outliers(sums, run, weights, tables, head);
#elif V_CODEC == 4
  add_level_values(sums, minima, run, weights, tables);
#elif V_CODEC == 3
  add_float_values(sums, run, weights, scale);
#elif (V_CODEC == 1 || V_CODEC == 2) && V_BY_ROWS
  add_values_by_token(sums, minima, run, weights);
#elif V_CODEC == 1 || V_CODEC == 2
  add_values_by_channel(sums, run, weights);
#endif
}
