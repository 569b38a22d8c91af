// Numbers that non-uniform integers keep exact beside the codes: corrections of scores and of weighted values.
//
// A correction is one more matrix product whose depth are the outliers: A says where each one goes (a token's row, a
// channel's row), B what it brings to each query head.
#pragma once
#include "attend_halves.cuh"

// sums += products, by tiles of 16 rows. `low`, `high` are the rows of the outliers 2 (lane % 4) + {0, 1} and of those
// 8 further as halves 1024 + row; b_low, b_high what they bring to head lane / 4.
template <int COUNT>
KVRT_INLINE void add_outliers(float (&sums)[COUNT][4], u32 low, u32 high, u32 b_low, u32 b_high) {
  const u32 row = 0x64006400u + threadIdx.x % WARP / 4 * 0x10001u;
#pragma unroll
  for (int m = 0; m < COUNT; ++m) {
    const u32 upper = row + 16 * m * 0x10001u, lower = upper + 8 * 0x10001u;
    ptx::mma_half(sums[m], ptx::equal_half2(low, upper), ptx::equal_half2(low, lower), ptx::equal_half2(high, upper),
                  ptx::equal_half2(high, lower), b_low, b_high);
  }
}

// A difference in a range whose products are halves: an infinity would be a NaN in every row.
KVRT_INLINE float held(float x, float most) { return max(min(x, most), -most); }

#if K_CODEC == 4
static constexpr int AT_ONCE = 3;  // entries of keys that a lane makes together
// Queries are up to 2^8 (`scale_of`), and a rotated difference has two channels.
static constexpr float QUERY_UNIT = 256.0f, MOST_OF_KEYS = 32752.0f;

// An outlier of keys as an entry: its difference from what the code says, for the pair's low and high channel as two
// halves (rotated by the token's offset, if keys are kept before RoPE); 1024 + token as a half, and the pair. There is
// no branch: entries of one lane are made together, so that they do not wait for each other.
KVRT_INLINE uint2 key_entry(const u8* run, const Tables& tables, u32 slot) {
  const bool used = slot >> 16 < 64 * HEAD_DIM;
  const u32 index = used ? slot >> 16 : 0, t = index / HEAD_DIM, c = index % HEAD_DIM;
  const u32 above = c >= HALF, pair = above ? c - HALF : c;
  const u32 j = t / 16, s = pair / 8, lane = t % 8 * 4 + pair % 8 / 2, lower = t / 8 % 2, one = pair & 1;
  const u32 reg = 2 * above + lower;
  const u32 level = level_at<K_BITS>(tables.levels(false), run + K_CODES_OFFSET, s, j, lane, reg, one);
  const u32* column = tables.columns() + (4 * s + pair % 8 / 2) * 4 + above;
  const u16 coded = u16(ptx::fma_half2(level, column[0] >> 16 * one, column[2] >> 16 * one));
  const float x = used ? held(ptx::half_to_float(u16(slot)) - ptx::half_to_float(coded), MOST_OF_KEYS) : 0;
  float low = above ? 0 : x, high = above ? x : 0;
  if (FORM == VIEW_PRE) {
    const u32 at = ((j * TILES + s) * WARP + lane) * 8 + 2 * lower + one;
    const u16* turn = reinterpret_cast<const u16*>(tables.place) + at;
    const float cosine = ptx::half_to_float(turn[0]), sine = ptx::half_to_float(turn[4]);
    low = above ? -x * sine : x * cosine;
    high = above ? x * cosine : x * sine;
  }
  return {ptx::pack_half(low, high), 0x6400 + t + (pair << 16)};
}

// What two outliers bring: the products of their halves with the query's, added for each.
KVRT_INLINE u32 dot_entries(const u32* query, const uint4& two) {
  const u32 a = ptx::mul_half2(query[two.y >> 16], two.x), b = ptx::mul_half2(query[two.w >> 16], two.z);
  return ptx::add_half2(ptx::prmt(a, b, 0x5410), ptx::prmt(a, b, 0x7632));
}

// scores += what outliers bring. Best where scores are zeros yet: a factor of them costs nothing then.
KVRT_INLINE void add_key_outliers(float (&scores)[4][4], const u8* run, const Query& query, const Tables& tables) {
  constexpr int ROUNDS = (K_OUTLIERS + WARP - 1) / WARP;
  const int lane = threadIdx.x % WARP, head = lane / 4, col = lane % 4;
  u32* pairs = tables.query() + head * QUERY_PITCH;
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    const u32 low = scale_half2(query.low[s], 1 / QUERY_UNIT), high = scale_half2(query.high[s], 1 / QUERY_UNIT);
    *reinterpret_cast<uint2*>(pairs + 8 * s + 2 * col) = {ptx::prmt(low, high, 0x5410), ptx::prmt(low, high, 0x7632)};
  }
  const u32* slots = reinterpret_cast<const u32*>(run + K_META_OFFSET);
#pragma unroll
  for (int first = 0; first < ROUNDS; first += AT_ONCE) {
    uint2 made[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n)
      if (first + n < ROUNDS) {
        const int i = (first + n) * WARP + lane;
        made[n] = key_entry(run, tables, i < K_SLOTS ? slots[i] : 0xFFFF0000u);
      }
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const int i = (first + n) * WARP + lane;
      if (first + n < ROUNDS && i < K_OUTLIERS) tables.entries()[i] = made[n];
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[j][i] *= 1 / QUERY_UNIT;
  __syncwarp();
  const uint4* entries = reinterpret_cast<const uint4*>(tables.entries()) + col;
#pragma unroll 2
  for (int k = 0; k < K_OUTLIERS / 16; ++k) {
    const uint4 a = entries[8 * k], b = entries[8 * k + 4];
    add_outliers(scores, ptx::prmt(a.y, a.w, 0x5410), ptx::prmt(b.y, b.w, 0x5410), dot_entries(pairs, a),
                 dot_entries(pairs, b));
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[j][i] *= QUERY_UNIT;
  __syncwarp();
}
#endif

#if V_CODEC == 4
static constexpr float MOST_OF_VALUES = 65504 / 16.0f;  // weights are up to 2^WEIGHT_BITS
static constexpr int VALUES_AT_ONCE = V_SLOTS > 1 ? 3 : 2;  // entries that a lane makes together

// Of the outliers of all heads, bring those of this head together at the beginning, as (f16 value, token * 256 +
// channel); give their number. A lane has the slots of whole tokens, or parts of them, and reads all before it writes.
KVRT_INLINE int gather_value_outliers(u32* slots, int head) {
  constexpr u32 A_TOKEN = V_SLOTS > 0 ? 2 * V_SLOTS : 1;
  constexpr int ALL = V_OUTLIERS / 4;                                // units of four slots
  constexpr int EACH = V_SLOTS > 5 ? 5 : V_SLOTS > 0 ? V_SLOTS : 1;  // of a lane in one round
  constexpr int ROUNDS = (ALL + EACH * WARP - 1) / (EACH * WARP);
  const u32 lane = threadIdx.x % WARP, others = head * HEAD_DIM;
  u32 count = 0;
#pragma unroll 1
  for (int round = 0; round < ROUNDS; ++round) {
    uint4 units[EACH];
    u32 mine = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int n = (round * WARP + lane) * EACH + i;
      units[i] = {~0u, ~0u, ~0u, ~0u};
      if (ROUNDS * EACH * WARP == ALL || n < ALL) units[i] = reinterpret_cast<const uint4*>(slots)[n];
#pragma unroll
      for (int j = 0; j < 4; ++j) mine += (word_of(units[i], j) >> 16) - others < HEAD_DIM;
    }
    u32 up_to = mine;  // of this lane and those before it
#pragma unroll
    for (int by = 1; by < WARP; by *= 2) {
      const u32 other = __shfl_sync(ALL_LANES, up_to, lane - by);
      if (lane >= by) up_to += other;
    }
    u32* to = slots + count + up_to - mine;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 slot = word_of(units[i], j), c = (slot >> 16) - others;
        const int inside = 4 * i + j;
        const u32 t = ROUNDS == 1 ? 2 * lane + inside / A_TOKEN
                                  : ((round * WARP + lane) * 4 * EACH + inside) / A_TOKEN;
        if (c < HEAD_DIM) *to++ = ptx::prmt(slot, c + 256 * t, 0x5410);
      }
    count += __shfl_sync(ALL_LANES, up_to, WARP - 1);
    __syncwarp();
  }
  return count;
}

// A gathered outlier, its value become the difference from what the code says.
KVRT_INLINE u32 value_entry(const u8* run, const Tables& tables, u32 slot) {
  const u32 t = slot >> 24, c = slot >> 16 & 255, pair = t % 8 / 2, one = t & 1;
  const u32 upper = t / 8 % 2 * 2, reg = upper + c / 8 % 2, lane = c % 8 * 4 + pair;
  const u16 level = level_at<V_BITS>(tables.levels(true), run + V_CODES_OFFSET, c / 16, t / 16, lane, reg, one);
  const u16* planes = reinterpret_cast<const u16*>(run + RUN_BYTES) + t / 16 * 16 + pair * 4 + upper + one;
  const float coded = ptx::half_to_float(level) * ptx::half_to_float(planes[64]) + ptx::half_to_float(planes[0]);
  return ptx::float_to_half(held(ptx::half_to_float(u16(slot)) - coded, MOST_OF_VALUES)) | (slot & 0xFFFF0000u);
}

KVRT_INLINE void add_value_outliers(float (&sums)[TILES][4], u8* run, const u32 (&low)[4], const u32 (&high)[4],
                                    const Tables& tables, int head) {
  const int lane = threadIdx.x % WARP, col = lane % 4;
  u16* weights = tables.weights() + lane / 4 * WEIGHTS_PITCH;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    *reinterpret_cast<u32*>(weights + 16 * j + 2 * col) = low[j];
    *reinterpret_cast<u32*>(weights + 16 * j + 8 + 2 * col) = high[j];
  }
  u32* slots = reinterpret_cast<u32*>(run + RUN_BYTES + 64 * 4);
  const int count = gather_value_outliers(slots, head), steps = (count + 15) / 16;
  for (int first = lane; first < 16 * steps; first += VALUES_AT_ONCE * WARP) {
    u32 made[VALUES_AT_ONCE];
#pragma unroll
    for (int n = 0; n < VALUES_AT_ONCE; ++n) {
      const int i = first + n * WARP;
      const u32 entry = value_entry(run, tables, i < count ? slots[i] : 0);
      made[n] = i < count ? entry : 0;
    }
#pragma unroll
    for (int n = 0; n < VALUES_AT_ONCE; ++n)
      if (first + n * WARP < 16 * steps) slots[first + n * WARP] = made[n];
  }
  __syncwarp();
#pragma unroll 2
  for (int k = 0; k < steps; ++k) {
    const uint2 a = reinterpret_cast<const uint2*>(slots)[8 * k + col];
    const uint2 b = reinterpret_cast<const uint2*>(slots)[8 * k + 4 + col];
    const u32 rows_a = (ptx::prmt(a.x, a.y, 0x7632) & 0x00FF00FFu) | 0x64006400u;
    const u32 rows_b = (ptx::prmt(b.x, b.y, 0x7632) & 0x00FF00FFu) | 0x64006400u;
    const u32 weights_a = weights[a.x >> 24] | u32(weights[a.y >> 24]) << 16;
    const u32 weights_b = weights[b.x >> 24] | u32(weights[b.y >> 24]) << 16;
    add_outliers(sums, rows_a, rows_b, ptx::mul_half2(ptx::prmt(a.x, a.y, 0x5410), weights_a),
                 ptx::mul_half2(ptx::prmt(b.x, b.y, 0x5410), weights_b));
  }
  __syncwarp();
}
#endif
