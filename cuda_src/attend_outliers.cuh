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

// A difference as a half has no infinity: that would be a NaN in every row.
KVRT_INLINE float held(float x) { return max(min(x, 65504.0f), -65504.0f); }

#if K_CODEC == 4
// An outlier of keys as an entry: its difference from what the code says, for the pair's low and high channel as two
// halves (rotated by the token's offset, if keys are kept before RoPE); 1024 + token as a half, and the pair.
KVRT_INLINE uint2 key_entry(const u8* run, const Tables& tables, u32 slot) {
  const int index = slot >> 16, t = index / HEAD_DIM % 64, c = index % HEAD_DIM, pair = c % HALF, above = c >= HALF;
  if (index >= 64 * HEAD_DIM) return {0, 0x6400};
  const int j = t / 16, s = pair / 8, lane = t % 8 * 4 + pair % 8 / 2, reg = 2 * above + (t % 16 >= 8), one = pair & 1;
  const u32 level = level_at<K_BITS>(tables.levels(false), run + K_CODES_OFFSET, s, j, lane, reg, one);
  const u32* column = tables.columns() + (4 * s + pair % 8 / 2) * 4 + above;
  const u16 coded = u16(ptx::fma_half2(level, column[0] >> 16 * one, column[2] >> 16 * one));
  const float x = held(ptx::half_to_float(u16(slot)) - ptx::half_to_float(coded));
  float low = above ? 0 : x, high = above ? x : 0;
  if (FORM == VIEW_PRE) {
    const u16* turn = reinterpret_cast<const u16*>(tables.place) + ((j * TILES + s) * WARP + lane) * 8 + one;
    const float cosine = ptx::half_to_float(turn[2 * (reg & 1)]), sine = ptx::half_to_float(turn[4 + 2 * (reg & 1)]);
    low = above ? -x * sine : x * cosine;
    high = above ? x * cosine : x * sine;
  }
  return {ptx::pack_half(low, high), u32(0x6400 + t) | u32(pair) << 16};
}

// What two outliers bring: the products of their halves with the query's, added for each.
KVRT_INLINE u32 dot_entries(const u32* query, const uint4& two) {
  const u32 a = ptx::mul_half2(query[two.y >> 16], two.x), b = ptx::mul_half2(query[two.w >> 16], two.z);
  return ptx::add_half2(ptx::prmt(a, b, 0x5410), ptx::prmt(a, b, 0x7632));
}

KVRT_INLINE void add_key_outliers(float (&scores)[4][4], const u8* run, const Query& query, const Tables& tables) {
  const int lane = threadIdx.x % WARP, head = lane / 4, col = lane % 4;
  u32* pairs = tables.query() + head * HALF;
#pragma unroll
  for (int s = 0; s < TILES; ++s)
    *reinterpret_cast<uint2*>(pairs + 8 * s + 2 * col) = {ptx::prmt(query.low[s], query.high[s], 0x5410),
                                                          ptx::prmt(query.low[s], query.high[s], 0x7632)};
  const u32* slots = reinterpret_cast<const u32*>(run + K_META_OFFSET);
  for (int i = lane; i < K_OUTLIERS; i += WARP)
    tables.entries()[i] = key_entry(run, tables, i < K_SLOTS ? slots[i] : 0xFFFF0000u);
  __syncwarp();
  const uint4* entries = reinterpret_cast<const uint4*>(tables.entries()) + col;
  for (int k = 0; k < K_OUTLIERS / 16; ++k) {
    const uint4 a = entries[8 * k], b = entries[8 * k + 4];
    add_outliers(scores, ptx::prmt(a.y, a.w, 0x5410), ptx::prmt(b.y, b.w, 0x5410), dot_entries(pairs, a),
                 dot_entries(pairs, b));
  }
  __syncwarp();
}
#endif

#if V_CODEC == 4
// Of the outliers of all heads, bring those of this head together at the beginning, as (f16 value, token * 256 +
// channel); give their number.
KVRT_INLINE int gather_value_outliers(u32* slots, int head) {
  const int lane = threadIdx.x % WARP;
  int count = 0;
  for (int start = 0; start < V_OUTLIERS; start += WARP) {
    const u32 slot = slots[start + lane], c = (slot >> 16) - head * HEAD_DIM;
    const bool mine = c < HEAD_DIM;
    const u32 all = __ballot_sync(ALL_LANES, mine);
    if (all == 0) continue;
    const u32 t = (start + lane) / (2 * V_SLOTS > 0 ? 2 * V_SLOTS : 1);
    if (mine) slots[count + __popc(all & ((1u << lane) - 1))] = (slot & 0xFFFFu) | c << 16 | t << 24;
    count += __popc(all);
  }
  __syncwarp();
  return count;
}

// A gathered outlier, its value become the difference from what the code says.
KVRT_INLINE u32 value_entry(const u8* run, const Tables& tables, u32 slot) {
  const int t = slot >> 24, c = slot >> 16 & 255, pair = t % 8 / 2, one = t & 1;
  const int reg = (t % 16 >= 8) * 2 + (c % 16 >= 8), lane = c % 8 * 4 + pair;
  const u16 level = level_at<V_BITS>(tables.levels(true), run + V_CODES_OFFSET, c / 16, t / 16, lane, reg, one);
  const u16* planes = reinterpret_cast<const u16*>(run + RUN_BYTES) + t / 16 * 16 + pair * 4 + (reg & 2) + one;
  const float coded = ptx::half_to_float(level) * ptx::half_to_float(planes[64]) + ptx::half_to_float(planes[0]);
  return ptx::float_to_half(held(ptx::half_to_float(u16(slot)) - coded)) | (slot & 0xFFFF0000u);
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
  for (int i = lane; i < 16 * steps; i += WARP) slots[i] = i < count ? value_entry(run, tables, slots[i]) : 0;
  __syncwarp();
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
