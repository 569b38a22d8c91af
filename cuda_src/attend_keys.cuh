// Scores of the 64 keys of a sealed page: keys are A (tokens are M), queries are B.
//
// sums[j] is a 16 x 8 tile of the tokens 16 j ... 16 j + 15 and the query heads: a lane has rows lane / 4 and + 8,
// heads 2 (lane % 4) and the next. Scores leave this file times the power of two that is in the query.
#pragma once
#include "attend_halves.cuh"

// What scores are made of: what the tensor cores added up, times a factor that goes with the place in a tile, plus what
// goes with the tile and the query head.
template <int COUNT>
struct Affine {
  float factor[4] = {1, 1, 1, 1}, shift[COUNT][2] = {};

  KVRT_INLINE void apply(float (&scores)[COUNT][4]) {
#pragma unroll
    for (int j = 0; j < COUNT; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[j][i] = scores[j][i] * factor[i] + shift[j][i & 1];
    *this = Affine();
  }
};

#if (K_CODEC == 1 || K_CODEC == 2) && FORM != VIEW_PRE
// Uniform integers: code * scale + shift.
// Sums of codes * B over tile s of the token tiles FIRST ... FIRST + COUNT - 1; `less_high`: how much less `high` is.
template <int FIRST, int COUNT>
KVRT_INLINE void add_codes(float (&sums)[4][4], const u8* codes, int s, u32 low, u32 high, float less_high) {
  Codes<K_BITS> tiles;
  tiles.load(codes, s);
#pragma unroll
  for (int j = FIRST; j < FIRST + COUNT; ++j) {
    u32 a[4];
    tiles.tile(a, j, s);
    ptx::mma_half(sums[j], a[0], a[1], a[2], a[3], scale_half2(low, low_columns<K_BITS>(j)),
                  scale_half2(high, high_columns<K_BITS>(j) * less_high));
  }
}

#if K_BY_ROWS
// Scales go with channels, so they go into the query; so do minima, whose sum is the same for all tokens of a group.
KVRT_INLINE void scores_by_channel(float (&scores)[4][4], Affine<4>& affine, const u8* run, const Query& query) {
  constexpr int TILES_A_GROUP = 4 / K_GROUPS;
  const int col = threadIdx.x % 4;
  const u8* codes = run + K_CODES_OFFSET;
  const uint2* scales = reinterpret_cast<const uint2*>(run + K_META_OFFSET);
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[j][i] = 0;
#pragma unroll
  for (int g = 0; g < K_GROUPS; ++g) {
    float shift[4] = {0, 0, 0, 0}, shift_high[4] = {0, 0, 0, 0};
#pragma unroll
    for (int s = 0; s < TILES; ++s) {
      uint2 scale = scales[(g * HEAD_DIM + 16 * s) / 4 + col];
      const u32 low_sign = scale.x & 0x80008000u, high_sign = scale.y & 0x80008000u;
      if (K_MODE == 2) scale = {scale.x & 0x7FFF7FFFu, scale.y & 0x7FFF7FFFu};
      const u32 low = ptx::mul_half2(query.low[s], scale.x), high = ptx::mul_half2(query.high[s], scale.y);
      if (K_MINIMA && s % 2 == 0) {
        // Two tiles at a time, as they come from memory: rows 0 ... 7 are minima of the low half of the head, and want
        // the query's low half, rows 8 ... 15 those of the high half. Registers need not be brought in order for that.
        const bool two = s + 1 < TILES;
        const int place = ((K_GROUPS + g) * HEAD_DIM + 16 * s) / 4 + col, t = two ? s + 1 : s;
        const uint2 a = scales[place], b = two ? scales[place + 4] : uint2{0, 0};
        ptx::mma_half(shift, a.x, a.y, b.x, b.y, query.low[s], query.low[t]);
        ptx::mma_half(shift_high, a.x, a.y, b.x, b.y, query.high[s], query.high[t]);
      }
      if (K_CODEC == 2 || K_MODE != 0) {
        // Where a hybrid's scale is negative its group is asymmetric, and has no middle.
        u32 low_middle = exact_half2(-K_MIDDLE), high_middle = exact_half2(-K_MIDDLE * LESS_HIGH);
        if (K_MODE == 2) {
          low_middle &= ~((low_sign >> 15) * 0xFFFFu);
          high_middle &= ~((high_sign >> 15) * 0xFFFFu);
        }
        ptx::mma_half(shift, low_middle, low_middle, high_middle, high_middle, low, high);
      }
      static_assert(Codes<K_BITS>::HIGH_COLUMNS == LESS_HIGH, "the query is made for that");
      if (g == 0)
        add_codes<0, TILES_A_GROUP>(scores, codes, s, low, high, LESS_HIGH);
      else
        add_codes<4 - TILES_A_GROUP, TILES_A_GROUP>(scores, codes, s, low, high, LESS_HIGH);
    }
    if (K_MINIMA)
#pragma unroll
      for (int h = 0; h < 2; ++h) shift[h] += shift_high[2 + h] * LESS_HIGH;
#pragma unroll
    for (int t = 0; t < TILES_A_GROUP; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) affine.shift[g * TILES_A_GROUP + t][h] = shift[h];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    affine.factor[i] = i < 2 ? FROM_SUBNORMAL : FROM_SUBNORMAL / Codes<K_BITS>::HIGH_ROWS;
}
#else
// Add the sums over the channels of group g to scores.
KVRT_INLINE void add_group(float (&scores)[4][4], const u8* codes, const u16* scales, const Query& query, int g) {
  const int row = threadIdx.x % WARP / 4;
  float sums[4][4], total[4] = {0, 0, 0, 0};
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[j][i] = 0;
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    // Which channels of the tile the group has: those of the low half of the head, of the high half, or both.
    const bool has_low = 8 * s / K_GROUP == g, has_high = (HALF + 8 * s) / K_GROUP == g;
    if (!has_low && !has_high) continue;
    const u32 low = has_low ? query.low[s] : 0, high = has_high ? query.high[s] : 0;
    ptx::mma_half(total, ONES, ONES, ONES, ONES, low, high);
    add_codes<0, 4>(sums, codes, s, low, high, 1.0f);
  }
  ptx::keep_order();
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int place = g * 64 + 16 * j + 8 * r + row;
      const u16 bits = scales[place];
      const float scale = ptx::half_to_float(K_MODE == 2 ? bits & 0x7FFF : bits);
      const bool has_minimum = K_CODEC == 1 && (K_MODE == 0 || (K_MODE == 2 && bits >> 15));
      const float shift = has_minimum ? ptx::half_to_float(scales[K_GROUPS * 64 + place]) : -K_MIDDLE * scale;
      const float factor = scale * (FROM_SUBNORMAL / (r ? Codes<K_BITS>::HIGH_ROWS : 1.0f));
      scores[j][2 * r] += sums[j][2 * r] * factor + total[0] * shift;
      scores[j][2 * r + 1] += sums[j][2 * r + 1] * factor + total[1] * shift;
    }
  ptx::keep_order();
}

// Scales go with tokens: each group of channels has its own sums, which are scaled when it is complete.
KVRT_INLINE void scores_by_token(float (&scores)[4][4], const u8* run, const Query& query) {
  const u8* codes = run + K_CODES_OFFSET;
  const u16* scales = reinterpret_cast<const u16*>(run + K_META_OFFSET);
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[j][i] = 0;
#pragma unroll
  for (int i = 0; i < K_GROUPS; ++i) {
    // Groups that share words come one after the other.
    const int g = K_GROUPS % 2 ? i : i / 2 + i % 2 * (K_GROUPS / 2);
    add_group(scores, codes, scales, query, g);
  }
}
#endif
#endif

#if K_CODEC == 3 && FORM != VIEW_PRE
// 8-bit floats: one scale for the head.
KVRT_INLINE void scores_of_floats(float (&scores)[4][4], const u8* run, const Query& query, float scale) {
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[j][i] = 0;
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    Codes<8> codes;
    codes.load(run + K_CODES_OFFSET, s);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 low[2], high[2];
      minifloats<K_E4M3>(low, word_of(codes.first, j));
      minifloats<K_E4M3>(high, word_of(codes.second, j));
      ptx::mma_half(scores[j], low[0], low[1], high[0], high[1], query.low[s], query.high[s]);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[j][i] *= scale * (K_E4M3 ? 256.0f : 1.0f);
}
#endif

// Scores of a page, once `affine` is applied; `scale` is that of the head (fp8).
KVRT_INLINE void page_scores(float (&scores)[4][4], Affine<4>& affine, const u8* run, const Query& query,
                             const Tables& tables, float scale) {
#if K_CODEC == 4 || (K_CODEC != 0 && FORM == VIEW_PRE)
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[j][i] = 0;
#if K_CODEC == 4 && K_SLOTS > 0
  scores_with_outliers(scores, run, query, tables);
#elif K_CODEC == 4
  level_scores(scores, affine.shift, run, query, tables);
#else
  half_scores(scores, run, query, tables);
#endif
#if K_CODEC == 3
  const float factor = scale * K_LESS;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[j][i] *= factor;
#endif
#elif K_CODEC == 3
  scores_of_floats(scores, run, query, scale);
#elif (K_CODEC == 1 || K_CODEC == 2) && K_BY_ROWS
  scores_by_channel(scores, affine, run, query);
#elif K_CODEC == 1 || K_CODEC == 2
  scores_by_token(scores, run, query);
#endif
}
