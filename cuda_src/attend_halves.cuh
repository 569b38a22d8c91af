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
// middle (`go_to_middle`, `keep_middle`), and goes on from there in a line. With FEW_HEADS the heads that are of no use
// are the slopes of the others there.
struct TileQuery {
  u32 low, high, low_slope = 0, high_slope = 0;
  bool slow;

  KVRT_INLINE TileQuery(const Query& query, const Tables& tables, int s) {
    low = query.low[s];
    high = query.high[s];
    slow = s >= TURNED_TILES;
    if (!slow) return;
    const uint4 line = tables.slow(s);
    const int of = FEW_HEADS ? s ^ 1 : s;  // where `make_four` has it in those heads
    low_slope = ptx::mul_half2(query.high[of], line.z);
    high_slope = ptx::mul_half2(query.low[of], line.w);
    if (FEW_HEADS && threadIdx.x % WARP >= 16) {
      low = low_slope;
      high = high_slope;
    }
  }
};

// Queries of the block's beginning become those of its middle in slow tiles.
KVRT_INLINE void go_to_middle(Query& query, const Tables& tables) {
#pragma unroll
  for (int s = FEW_HEADS ? TURNED_TILES / 2 * 2 : TURNED_TILES; s < TILES; ++s) {
    const int of = FEW_HEADS && threadIdx.x % WARP >= 16 ? s ^ 1 : s;  // see `make_four`
    if (of < TURNED_TILES) continue;
    const uint4 line = tables.slow(of);
    const u32 low = query.low[s], high = query.high[s];
    query.low[s] = ptx::fma_half2(low, line.x, ptx::mul_half2(high, line.y));
    query.high[s] = ptx::fma_half2(high, line.x, ptx::neg_half2(ptx::mul_half2(low, line.y)));
  }
}

// The same of what `make_four` starts from: it may be turned to the middle before it is turned to where the block is.
KVRT_INLINE void keep_middle(float (&x)[TILES][2], const Tables& tables) {
#pragma unroll
  for (int t = TURNED_TILES / 2; t < TILES / 2; ++t) {
    const int s = 2 * t + threadIdx.x % WARP / 16;
    if (s < TURNED_TILES) continue;
    const uint4 line = tables.slow(s);
    const float2 cosine = ptx::unpack_half(line.x), sine = ptx::unpack_half(line.y);
    turn_back(x[t], x[TILES / 2 + t], cosine, sine);
  }
}

// Where a row of tile j (lane / 4, or with `lower` 8 further) is in a block: -1 ... 1.
KVRT_INLINE float place_in_block(int j, int lower) {
  return (int(threadIdx.x % WARP / 4) + 16 * j + 8 * lower - 32) / 32.0f;
}

// What slow tiles bring to a score, of a sum of slopes: at `place`. With FEW_HEADS the sum is of both.
KVRT_INLINE float on_line(float sum, float place) {
  return FEW_HEADS ? sum + __shfl_xor_sync(ALL_LANES, sum, 2) * place : sum * place;
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
    if (is_turned(s)) turn_tile(a, tables.turn(j, s));
    ptx::mma_half(query.slow && FEW_HEADS ? slopes[j] : scores[j], a[0], a[1], a[2], a[3], query.low, query.high);
    if (query.slow && !FEW_HEADS)
      ptx::mma_half(slopes[j], a[0], a[1], a[2], a[3], query.low_slope, query.high_slope);
  }

  // After tile s.
  KVRT_INLINE void end_tile(int s) {
    if (!HAS_SLOW || s != TILES - 1) return;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[j][i] += on_line(slopes[j][i], place_in_block(j, i >> 1));
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

#if K_BY_ROWS
static constexpr int TILES_A_GROUP = 4 / K_GROUPS;
static_assert(K_GROUPS <= 2, "a tile of 16 rows has the minima of two groups");

// Where a lane's two scales of tile s are, of the low or the high half of the head; minima are the groups after them.
KVRT_INLINE const u32* columns(const u8* run, int s, int group, int half) {
  const u32* scales = reinterpret_cast<const u32*>(run + K_META_OFFSET);
  return scales + group * (HEAD_DIM / 2) + 8 * s + threadIdx.x % 4 * 2 + half;
}

KVRT_INLINE void load_columns(u32& scale, u32& shift, const u8* run, int s, int group, int half) {
  scale = *columns(run, s, group, half);
  affine(scale, shift, K_MINIMA ? *columns(run, s, K_GROUPS + group, half) : 0);
}

// What is added to codes times scale, as a half: a middle's is rounded, by 2^-12 of the largest key of the channel.
KVRT_INLINE u32 column_shift(const u8* run, int s, int group, int half) {
  // Alone, and not with the other half: it would have to be moved to where it is wanted.
  if (K_MINIMA && K_MODE == 0) return *const_cast<const volatile u32*>(columns(run, s, K_GROUPS + group, half));
  u32 scale, shift;
  load_columns(scale, shift, run, s, group, half);
  return K_CENTRED ? ptx::mul_half2(scale, exact_half2(-K_MIDDLE)) : shift;
}

// Scores, 0 before, of slow tiles as `scores_by_channel` makes them: scales go into the query, and codes stay fields.
// So a query times a scale must be a half, as there: scales up to 255, less where RoPE has an amplitude.
KVRT_INLINE void slow_scores(float (&scores)[4][4], const u8* run, const Query& query, const Tables& tables) {
  float slopes[4][4], shift[4] = {0, 0, 0, 0}, shift_slope[4] = {0, 0, 0, 0};
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) slopes[j][i] = 0;
  Codes<K_BITS> codes;
#pragma unroll
  for (int s = TURNED_TILES; s < TILES; ++s) {
    const TileQuery tile(query, tables, s);
    u32 a[4];
    // Rows 0 ... 7 are the first group's, rows 8 ... 15 the last one's.
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = column_shift(run, s, r % 2 * (K_GROUPS - 1), r / 2);
    ptx::mma_half(shift, a[0], a[1], a[2], a[3], tile.low, tile.high);
    if (!FEW_HEADS) ptx::mma_half(shift_slope, a[0], a[1], a[2], a[3], tile.low_slope, tile.high_slope);
    codes.load(run + K_CODES_OFFSET, s);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 scale[2], unused;
#pragma unroll
      for (int half = 0; half < 2; ++half) load_columns(scale[half], unused, run, s, j / TILES_A_GROUP, half);
      const auto low = [&](u32 x) { return ptx::mul_half2(scale_half2(x, low_columns<K_BITS>(j)), scale[0]); };
      const auto high = [&](u32 x) { return ptx::mul_half2(scale_half2(x, high_columns<K_BITS>(j)), scale[1]); };
      codes.tile(a, j, s);
      ptx::mma_half(scores[j], a[0], a[1], a[2], a[3], low(tile.low), high(tile.high));
      if (!FEW_HEADS) ptx::mma_half(slopes[j], a[0], a[1], a[2], a[3], low(tile.low_slope), high(tile.high_slope));
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float factor = FROM_SUBNORMAL / (i < 2 ? 1.0f : Codes<K_BITS>::HIGH_ROWS);
      const int sum = j / TILES_A_GROUP * 2 + i % 2;
      const float place = place_in_block(j, i >> 1), score = scores[j][i] * factor + shift[sum];
      scores[j][i] = FEW_HEADS ? on_line(score, place)
                               : score + on_line(slopes[j][i] * factor + shift_slope[sum], place);
    }
}
#endif

KVRT_INLINE void half_scores(float (&scores)[4][4], const u8* run, const Query& query, const Tables& tables) {
  Codes<K_BITS> codes;
#if K_BY_ROWS
  if (HAS_SLOW) slow_scores(scores, run, query, tables);
  HalfScores sums(scores);
#pragma unroll
  for (int s = 0; s < TURNED_TILES; ++s) {
    const TileQuery tile(query, tables, s);
    codes.load(run + K_CODES_OFFSET, s);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 scale[4], shift[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) load_columns(scale[r], shift[r], run, s, j / TILES_A_GROUP, r / 2);
      add_affine_tile(sums, codes, scale, shift, tile, tables, j, s);
    }
  }
#else
  HalfScores sums(scores);
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
    sums.end_tile(s);
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
    sums.end_tile(s);
  }
}
#elif K_CODEC == 4
// The columns of a tile's query, and of halves and centres, are swapped if keys' columns are: not where tiles are
// turned, because partners of a RoPE pair are in one register then.
KVRT_INLINE void swap_tile(TileQuery& tile, uint4& column) {
  swap_columns(tile.low, tile.high);
  if (tile.slow && !FEW_HEADS) swap_columns(tile.low_slope, tile.high_slope);
  swap_columns(column.x, column.y);
  swap_columns(column.z, column.w);
}

// `shift` is what the scores of a query head lack, of each tile.
KVRT_INLINE void level_scores(float (&scores)[4][4], float (&shift)[4][2], const u8* run, const Query& query,
                              const Tables& tables) {
  const Levels<K_BITS> levels(tables, false);
  Codes<K_BITS> codes;
  float centres[4] = {0, 0, 0, 0};
  HalfScores sums(scores);
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int s = tile_at(i);
    codes.load(run + K_CODES_OFFSET, s);
    uint4 column = tables.column(s);
    TileQuery tile(query, tables, s);
    if (!KEYS_ARE_NUMBERS) {
      // Half goes into the query; centres are one sum for all tokens.
      ptx::mma_half(centres, column.z, column.z, column.w, column.w, tile.low, tile.high);
      tile.low = ptx::mul_half2(tile.low, column.x);
      tile.high = ptx::mul_half2(tile.high, column.y);
    }
    if (levels.SWAPS && !is_turned(s)) swap_tile(tile, column);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 a[4];
      levels.tile(a, tile_word(codes, j), s, !is_turned(s));
      if (KEYS_ARE_NUMBERS) make_numbers(a, column.x, column.y, column.z, column.w);
      sums.add(a, tile, tables, j, s);
    }
    sums.end_tile(s);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) shift[j][h] = centres[h];
}

#if K_SLOTS > 0
// The same where some are kept exact: numbers are made first, and exact ones put between them.
//
// Sixteen tokens after sixteen, in a loop: code that a warp passes once, for its only page, is waited for, and so much
// of it straight on would take more registers than there are.
KVRT_INLINE void scores_with_outliers(float (&scores)[4][4], const u8* run, const Query& query, const Tables& tables) {
  constexpr int GROUP = KeyOutliers::GROUP;
  const Levels<K_BITS> levels(tables, false);
  const KeyOutliers outliers(run, tables.room(), levels.SWAPS);
  u32 low[TILES], high[TILES], low_slope[TILES], high_slope[TILES];
  uint4 columns[TILES];
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    TileQuery tile(query, tables, s);
    columns[s] = tables.column(s);
    if (levels.SWAPS && !is_turned(s)) swap_tile(tile, columns[s]);
    low[s] = tile.low;
    high[s] = tile.high;
    low_slope[s] = tile.low_slope;
    high_slope[s] = tile.high_slope;
  }
  float place = place_in_block(0, 0);
#pragma unroll 2
  for (int j = 0; j < 4; ++j) {
    float sums[2][4] = {}, slopes[4] = {};
    u32 words[TILES];
    tile_words<K_BITS>(words, run + K_CODES_OFFSET, j);
#pragma unroll
    for (int first = 0; first < TILES; first += GROUP) {
      const int count = TILES - first < GROUP ? TILES - first : GROUP;
      u32 a[GROUP][4];  // no load goes ahead of what is written
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int s = tile_at(first + i);
        levels.tile(a[i], words[s], s, !is_turned(s));
        make_numbers(a[i], columns[s].x, columns[s].y, columns[s].z, columns[s].w);
      }
      write_with_outliers(a, outliers, j * TILES + first, count);
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int s = tile_at(first + i);
        u32(&x)[4] = a[i];
        read_tile(x, outliers.room + i * TILE_BYTES);
        if (is_turned(s)) turn_tile(x, tables.turn(j, s));
        const bool slow = s >= TURNED_TILES;
        ptx::mma_half(slow && FEW_HEADS ? slopes : sums[i % 2], x[0], x[1], x[2], x[3], low[s], high[s]);
        if (slow && !FEW_HEADS) ptx::mma_half(slopes, x[0], x[1], x[2], x[3], low_slope[s], high_slope[s]);
      }
    }
    // Scores move on, so that their registers are known when compiling.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[0][i] = scores[1][i];
      scores[1][i] = scores[2][i];
      scores[2][i] = scores[3][i];
      scores[3][i] = sums[0][i] + sums[1][i];
      if (HAS_SLOW) scores[3][i] += on_line(slopes[i], i < 2 ? place : place + 8 / 32.0f);
    }
    place += 16 / 32.0f;
  }
}
#endif
#endif
