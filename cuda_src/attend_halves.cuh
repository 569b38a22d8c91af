// Scores of the 64 keys of a sealed page whose keys must become numbers first: those before RoPE, whose rotation
// depends on token and channel, and non-uniform integers. Keys are halves in registers, tile by tile.
#pragma once
#include "attend_outliers.cuh"

#if K_CODEC == 1 || K_CODEC == 2
static constexpr int K_GROUPS = (K_BY_ROWS ? 64 : HEAD_DIM) / K_GROUP;
static constexpr int K_MIDDLE = K_CODEC == 2 ? 1 << (K_BITS - 1) : (1 << (K_BITS - 1)) - 1;
static constexpr bool K_MINIMA = K_CODEC == 1 && K_MODE != 1, K_CENTRED = K_CODEC == 2 || K_MODE == 1;
#endif

// What keys of a tile of channels are multiplied with. Slow tiles are not turned: their query is that of the block's
// middle, and goes on from there in a line.
struct TileQuery {
  u32 low, high, low_slope = 0, high_slope = 0;
  bool slow, turned;

  KVRT_INLINE TileQuery(const Query& query, const Tables& tables, int s) {
    low = query.low[s];
    high = query.high[s];
    turned = FORM == VIEW_PRE && s < TURNED_TILES;
    slow = s >= TURNED_TILES;
    if (!slow) return;
    const uint4 line = tables.slow(s);
    const u32 before = low;
    low = ptx::fma_half2(low, line.x, ptx::mul_half2(high, line.y));
    high = ptx::fma_half2(high, line.x, ptx::neg_half2(ptx::mul_half2(before, line.y)));
    low_slope = ptx::mul_half2(high, line.z);
    high_slope = ptx::neg_half2(ptx::mul_half2(low, line.z));
  }
};

// Where a row of tile j (lane / 4, or with `lower` 8 further) is in a block: -1 ... 1.
KVRT_INLINE float place_in_block(int j, int lower) {
  return (int(threadIdx.x % WARP / 4) + 16 * j + 8 * lower - 32) / 32.0f;
}

// Slow tiles come first, and what they bring is put together before the others come: that takes less registers.
KVRT_INLINE int tile_at(int i) { return (i + TURNED_TILES) % TILES; }

// Scores of a page, as they are summed up.
struct HalfScores {
  float (&scores)[4][4];
  float slopes[4][4];

  KVRT_INLINE explicit HalfScores(float (&scores)[4][4]) : scores(scores) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) slopes[j][i] = 0;
  }

  // Rotate the keys of a tile, if need be, and multiply them.
  KVRT_INLINE void add(u32 (&a)[4], const TileQuery& query, const Tables& tables, int j, int s) {
    if (query.turned) turn_tile(a, tables.turn(j, s));
    ptx::mma_half(scores[j], a[0], a[1], a[2], a[3], query.low, query.high);
    if (query.slow) ptx::mma_half(slopes[j], a[0], a[1], a[2], a[3], query.low_slope, query.high_slope);
  }

  // After tile s of the token tiles first ... first + count - 1.
  KVRT_INLINE void end_tile(int s, int first, int count) {
    if (!HAS_SLOW || s != TILES - 1) return;
#pragma unroll
    for (int j = first; j < first + count; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[j][i] += slopes[j][i] * place_in_block(j, i >> 1);
  }
};

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
KVRT_INLINE void add_affine_tile(HalfScores& sums, const Codes<K_BITS>& codes, const u32 (&scale)[4],
                                 const u32 (&shift)[4], const TileQuery& query, const Tables& tables, int j, int s) {
  u32 a[4];
  codes.tile(a, j, s);
  make_integers<K_BITS>(a, j, K_CENTRED ? K_MIDDLE : 0, tables.thousand);
#pragma unroll
  for (int r = 0; r < 4; ++r)
    a[r] = K_CENTRED ? ptx::mul_half2(a[r], scale[r]) : ptx::fma_half2(a[r], scale[r], shift[r]);
  sums.add(a, query, tables, j, s);
}

KVRT_INLINE void half_scores(float (&scores)[4][4], const u8* run, const Query& query, const Tables& tables) {
  Codes<K_BITS> codes;
  HalfScores sums(scores);
#if K_BY_ROWS
  constexpr int TILES_A_GROUP = 4 / K_GROUPS;
  const uint2* scales = reinterpret_cast<const uint2*>(run + K_META_OFFSET) + threadIdx.x % 4;
#pragma unroll
  for (int g = 0; g < K_GROUPS; ++g)
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      const int s = tile_at(i);
      const TileQuery tile(query, tables, s);
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
        add_affine_tile(sums, codes, scale, shift, tile, tables, j, s);
      }
      sums.end_tile(s, g * TILES_A_GROUP, TILES_A_GROUP);
    }
#else
  const u16* scales = reinterpret_cast<const u16*>(run + K_META_OFFSET) + threadIdx.x % WARP / 4;
  u32 scale[4][4], shift[4][4];
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    // Tiles whose channels are in the same two groups share scales.
    const int s = tile_at(i), low = 8 * s / K_GROUP, high = (HALF + 8 * s) / K_GROUP;
    const int before = tile_at(i + TILES - 1);
    if (i == 0 || low != 8 * before / K_GROUP || high != (HALF + 8 * before) / K_GROUP)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int place = (r < 2 ? low : high) * 64 + 16 * j + 8 * (r & 1);
          scale[j][r] = scales[place] * 0x10001u;
          affine(scale[j][r], shift[j][r], K_MINIMA ? scales[K_GROUPS * 64 + place] * 0x10001u : 0);
        }
    const TileQuery tile(query, tables, s);
    codes.load(run + K_CODES_OFFSET, s);
#pragma unroll
    for (int j = 0; j < 4; ++j) add_affine_tile(sums, codes, scale[j], shift[j], tile, tables, j, s);
    sums.end_tile(s, 0, 4);
  }
#endif
}
#elif K_CODEC == 3
// 8-bit floats; those of keys come out so many times less than they are: e5m2 before RoPE would not be halves any more
// once they are turned.
static constexpr float K_LESS = K_E4M3 ? 256.0f : FORM == VIEW_PRE ? 2.0f : 1.0f;

KVRT_INLINE void half_scores(float (&scores)[4][4], const u8* run, const Query& query, const Tables& tables) {
  Codes<8> codes;
  HalfScores sums(scores);
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int s = tile_at(i);
    const TileQuery tile(query, tables, s);
    codes.load(run + K_CODES_OFFSET, s);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 low[2], high[2];
      minifloats<K_E4M3>(low, word_of(codes.first, j));
      minifloats<K_E4M3>(high, word_of(codes.second, j));
      u32 a[4] = {low[0], low[1], high[0], high[1]};
      if (!K_E4M3)
#pragma unroll
        for (int r = 0; r < 4; ++r) a[r] = scale_half2(a[r], 1 / K_LESS);
      sums.add(a, tile, tables, j, s);
    }
    sums.end_tile(s, 0, 4);
  }
}
#elif K_CODEC == 4
// `shift` is what the scores of a query head lack, of each tile.
KVRT_INLINE void level_scores(float (&scores)[4][4], float (&shift)[4][2], const u8* run, const Query& query,
                              const Tables& tables) {
  constexpr int GROUP = KeyOutliers::GROUP, GROUPS = (TILES + GROUP - 1) / GROUP;
  const Levels<K_BITS> levels(tables, false);
  const KeyOutliers outliers(run, tables.room());
  Codes<K_BITS> codes;
  float centres[4] = {0, 0, 0, 0};
  HalfScores sums(scores);
#pragma unroll
  for (int n = 0; n < GROUPS; ++n) {
    const int first = (n + TURNED_TILES / GROUP) % GROUPS * GROUP;  // as `tile_at`
    u32 a[GROUP][4][4];
#pragma unroll
    for (int s = first; s < first + GROUP && s < TILES; ++s) {
      codes.load(run + K_CODES_OFFSET, s);
      const uint4 column = reinterpret_cast<const uint4*>(tables.columns())[4 * s + threadIdx.x % 4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32(&x)[4] = a[s - first][j];
        levels.template tile<!KEYS_ARE_NUMBERS>(x, codes, j, s);
        if (KEYS_ARE_NUMBERS)
#pragma unroll
          for (int r = 0; r < 4; ++r)
            x[r] = ptx::fma_half2(x[r], r < 2 ? column.x : column.y, r < 2 ? column.z : column.w);
      }
    }
    if (KEY_OUTLIERS) outliers.put(a, first);
#pragma unroll
    for (int s = first; s < first + GROUP && s < TILES; ++s) {
      TileQuery tile(query, tables, s);
      if (!KEYS_ARE_NUMBERS) {
        // Half goes into the query; centres are one sum for all tokens.
        const uint4 column = reinterpret_cast<const uint4*>(tables.columns())[4 * s + threadIdx.x % 4];
        ptx::mma_half(centres, column.z, column.z, column.w, column.w, tile.low, tile.high);
        tile.low = ptx::mul_half2(tile.low, column.x);
        tile.high = ptx::mul_half2(tile.high, column.y);
        if (levels.SWAPS) swap_columns(tile.low, tile.high);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) sums.add(a[s - first][j], tile, tables, j, s);
      sums.end_tile(s, 0, 4);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) shift[j][h] = centres[h];
}
#endif
