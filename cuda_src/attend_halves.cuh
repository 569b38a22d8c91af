// Scores of the 64 keys of a sealed page whose keys must become numbers first: those before RoPE, whose rotation
// depends on token and channel, and non-uniform integers. Keys are halves in registers, tile by tile.
#pragma once
#include "attend_levels.cuh"

#if K_CODEC == 1 || K_CODEC == 2
static constexpr int K_GROUPS = (K_BY_ROWS ? 64 : HEAD_DIM) / K_GROUP;
static constexpr int K_MIDDLE = K_CODEC == 2 ? 1 << (K_BITS - 1) : (1 << (K_BITS - 1)) - 1;
static constexpr bool K_MINIMA = K_CODEC == 1 && K_MODE != 1, K_CENTRED = K_CODEC == 2 || K_MODE == 1;
#endif

// Rotate a tile, if keys are kept before RoPE, and multiply it.
KVRT_INLINE void add_tile(float (&sums)[4], u32 (&a)[4], const Query& query, const Tables& tables, int j, int s) {
  if (FORM == VIEW_PRE) turn_tile(a, tables.turn(j, s));
  ptx::mma_half(sums, a[0], a[1], a[2], a[3], query.low[s], query.high[s]);
}

#if K_CODEC == 1 || K_CODEC == 2
// A half2 of scales becomes what to multiply codes by and what to add to the product.
KVRT_INLINE void affine(u32& scale, u32& shift, u32 minimum) {
  // Where a hybrid's scale is negative its group has a minimum.
  const u32 mask = K_MODE == 2 ? (scale >> 15 & 0x00010001u) * 0xFFFFu : 0;
  if (K_MODE == 2) scale &= 0x7FFF7FFFu;
  shift = K_CENTRED ? 0 : minimum;
  if (K_MODE == 2) shift = (minimum & mask) | (ptx::mul_half2(scale, exact_half2(-K_MIDDLE)) & ~mask);
}

// Keys of tile (s, j): scales and shifts of the registers 0 ... 3 are (first, second, first, second) of either half.
KVRT_INLINE void add_affine_tile(float (&sums)[4], const Codes<K_BITS>& codes, const u32 (&scale)[4],
                                 const u32 (&shift)[4], const Query& query, const Tables& tables, int j, int s) {
  u32 a[4];
  codes.tile(a, j, s);
  make_integers<K_BITS>(a, j, K_CENTRED ? K_MIDDLE : 0, tables.thousand);
#pragma unroll
  for (int r = 0; r < 4; ++r)
    a[r] = K_CENTRED ? ptx::mul_half2(a[r], scale[r]) : ptx::fma_half2(a[r], scale[r], shift[r]);
  add_tile(sums, a, query, tables, j, s);
}

KVRT_INLINE void half_scores(float (&scores)[4][4], const u8* run, const Query& query, const Tables& tables) {
  Codes<K_BITS> codes;
#if K_BY_ROWS
  constexpr int TILES_A_GROUP = 4 / K_GROUPS;
  const uint2* scales = reinterpret_cast<const uint2*>(run + K_META_OFFSET) + threadIdx.x % 4;
#pragma unroll
  for (int g = 0; g < K_GROUPS; ++g)
#pragma unroll
    for (int s = 0; s < TILES; ++s) {
      codes.load(run + K_CODES_OFFSET, s);
      const int place = (g * HEAD_DIM + 16 * s) / 4;
      const uint2 columns = scales[place];
      uint2 minima = {0, 0};
      if (K_MINIMA) minima = scales[K_GROUPS * HEAD_DIM / 4 + place];
      u32 scale[4] = {columns.x, columns.x, columns.y, columns.y}, shift[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) affine(scale[r], shift[r], r < 2 ? minima.x : minima.y);
#pragma unroll
      for (int t = 0; t < TILES_A_GROUP; ++t) {
        const int j = g * TILES_A_GROUP + t;
        add_affine_tile(scores[j], codes, scale, shift, query, tables, j, s);
      }
    }
#else
  const u16* scales = reinterpret_cast<const u16*>(run + K_META_OFFSET) + threadIdx.x % WARP / 4;
  u32 scale[4][4], shift[4][4];
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    // Tiles whose channels are in the same two groups share scales.
    const int low = 8 * s / K_GROUP, high = (HALF + 8 * s) / K_GROUP;
    if (s == 0 || low != 8 * (s - 1) / K_GROUP || high != (HALF + 8 * (s - 1)) / K_GROUP)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int place = (r < 2 ? low : high) * 64 + 16 * j + 8 * (r & 1);
          scale[j][r] = scales[place] * 0x10001u;
          affine(scale[j][r], shift[j][r], K_MINIMA ? scales[K_GROUPS * 64 + place] * 0x10001u : 0);
        }
    codes.load(run + K_CODES_OFFSET, s);
#pragma unroll
    for (int j = 0; j < 4; ++j) add_affine_tile(scores[j], codes, scale[j], shift[j], query, tables, j, s);
  }
#endif
}
#elif K_CODEC == 3
// 8-bit floats; e4m3 come out 2^-8 of their value.
KVRT_INLINE void half_scores(float (&scores)[4][4], const u8* run, const Query& query, const Tables& tables) {
  Codes<8> codes;
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    codes.load(run + K_CODES_OFFSET, s);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 low[2], high[2];
      minifloats<K_E4M3>(low, word_of(codes.first, j));
      minifloats<K_E4M3>(high, word_of(codes.second, j));
      u32 a[4] = {low[0], low[1], high[0], high[1]};
      add_tile(scores[j], a, query, tables, j, s);
    }
  }
}
#elif K_CODEC == 4
// `shift` is what the scores of a query head lack, of each tile.
KVRT_INLINE void level_scores(float (&scores)[4][4], float (&shift)[4][2], const u8* run, const Query& query,
                              const Tables& tables) {
  const Levels<K_BITS> levels(tables, false);
  Codes<K_BITS> codes;
  float centres[4] = {0, 0, 0, 0};
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    codes.load(run + K_CODES_OFFSET, s);
    const uint4 column = reinterpret_cast<const uint4*>(tables.columns())[4 * s + threadIdx.x % 4];
    u32 low = query.low[s], high = query.high[s];
    if (FORM != VIEW_PRE) {
      // Half goes into the query; centres are one sum for all tokens.
      ptx::mma_half(centres, column.z, column.z, column.w, column.w, low, high);
      low = ptx::mul_half2(low, column.x);
      high = ptx::mul_half2(high, column.y);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 a[4];
      levels.tile(a, codes, j, s);
      if (FORM == VIEW_PRE) {
#pragma unroll
        for (int r = 0; r < 4; ++r)
          a[r] = ptx::fma_half2(a[r], r < 2 ? column.x : column.y, r < 2 ? column.z : column.w);
        turn_tile(a, tables.turn(j, s));
      }
      ptx::mma_half(scores[j], a[0], a[1], a[2], a[3], low, high);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) shift[j][h] = centres[h];
}
#endif
