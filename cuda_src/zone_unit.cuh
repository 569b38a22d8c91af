// One unit of attention over zones, by a team of two warps: a block of a zone, or up to 32 exact rows of the tail.
//
// Its bytes lie in shared memory. A block's scales go into the query and into the weights of the softmax, its minima
// into sums of their own, so that codes alone are multiplied. A warp has 32 tokens of a block; exact rows are the first
// warp's. Here are a unit's scores; zone_softmax.cuh has what becomes of them.
//
// Scores of a warp are two tiles m: a lane has those of the tokens 4 (lane / 4) + 2 m + {0, 1}, of the columns
// 2 (lane % 4) and the next: these are query heads, and of four of them once more.
#pragma once
#include "attend_merge.cuh"
#include "zone_lines.cuh"

static constexpr int TEAM_WARPS = 2, TEAM = TEAM_WARPS * WARP, WARP_TOKENS = BLOCK_TOKENS / TEAM_WARPS;
static constexpr int EXACT_ROWS = WARP_TOKENS;
static constexpr int EXACT_PITCH = HEAD_DIM * 2 + 16;  // bytes of a row of exact keys: 8 rows meet all banks
static constexpr int EXACT_VALUES = EXACT_ROWS * EXACT_PITCH;
static constexpr int EXACT_BYTES = EXACT_VALUES + EXACT_ROWS * HEAD_DIM * 2;
static constexpr int BLOCK_BYTES = BLOCK_TOKENS * HEAD_DIM * 4 + 16;  // no block has more

// Halves are weighed by up to 2^14, and codes so that all weights are below 2^15: a half has 65504 at most.
static constexpr int HALVES = 14;

// The exponent of a half that is not negative.
KVRT_INLINE int exponent_of(u32 half) {
  return max(int(__float_as_uint(ptx::half_to_float(u16(half))) >> 23) - 127, -24);
}

// The sum over the warp of x[i], in lanes whose number divided by WARP / COUNT is i.
template <int COUNT>
KVRT_INLINE float spread_sum(float (&x)[COUNT], int lane) {
  int bit = WARP / 2;
#pragma unroll
  for (int n = COUNT / 2; n > 0; n /= 2, bit /= 2)
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float kept = lane & bit ? x[i + n] : x[i], given = lane & bit ? x[i] : x[i + n];
      x[i] = kept + __shfl_xor_sync(ALL_LANES, given, bit);
    }
#pragma unroll
  for (; bit > 0; bit /= 2) x[0] += __shfl_xor_sync(ALL_LANES, x[0], bit);
  return x[0];
}

// The query heads of a CTA in shared memory: times powers of two that bring their largest numbers to 1 ... 2.
struct Query {
  float channels[HEAD_DIM][HEADS];
  float units[HEADS];  // to multiply scores by

  // By a warp: q (HEAD_DIM,), or nullptr for a head that there is not.
  KVRT_INLINE void read(int head, const float4* q, float scale) {
    const int lane = threadIdx.x % WARP;
    float4 parts[PARTS];
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      parts[i] = {0, 0, 0, 0};
      if (!q || lane + WARP * i >= QUARTERS) continue;
      const float4 x = q[lane + WARP * i];
      parts[i] = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
      const float top = fmaxf(fmaxf(fabsf(parts[i].x), fabsf(parts[i].y)), fmaxf(fabsf(parts[i].z), fabsf(parts[i].w)));
      largest = max(largest, __float_as_uint(top));
    }
    const int exponent = min(max(int(__reduce_max_sync(ALL_LANES, largest) >> 23) - 127, -100), 100);
    const float factor = power(-exponent);
#pragma unroll
    for (int i = 0; i < PARTS; ++i)
      if (lane + WARP * i < QUARTERS) {
        float* to = &channels[4 * (lane + WARP * i)][head];
        to[0] = parts[i].x * factor;
        to[HEADS] = parts[i].y * factor;
        to[2 * HEADS] = parts[i].z * factor;
        to[3 * HEADS] = parts[i].w * factor;
      }
    if (lane == 0) units[head] = power(exponent);
  }
};

// The channels of a block that a thread makes the query of.
struct OwnChannels {
  static constexpr int MOST = (HEAD_DIM + TEAM - 1) / TEAM;
  u32 of[MOST] = {};

  KVRT_INLINE void read(const ZoneBlock& block, int thread) {
#pragma unroll
    for (int i = 0; i < MOST; ++i)
      if (thread + i * TEAM < block.widths.total()) of[i] = ptx::load_early(block.channels + thread + i * TEAM);
  }
};

// What a team has in shared memory beside a unit's bytes.
struct TeamSpace {
  Weights<HEAD_DIM> query;  // of channels in a block's order, times their scales
  Weights<WARP_TOKENS> weights[TEAM_WARPS];
  float minima[TEAM_WARPS][HEADS];  // what minima of keys add to all scores
};

// The unit of a team; `thread` is a number in the team.
struct Unit {
  const u8* bytes;
  TeamSpace& space;
  int thread;

  // Begin to copy a block's run.
#if KVRT_BULK_COPIES
  static KVRT_INLINE void fetch(u8* to, u64* arrival, const ZoneBlock& block) {
    const int size = block.bytes(HEAD_DIM);
    ptx::barrier_expect(arrival, size);
    ptx::copy_bulk(to, block.run, size, arrival);
  }
#else
  static KVRT_INLINE void fetch(u8* to, const ZoneBlock& block, int thread) {
    const int size = block.bytes(HEAD_DIM);
#pragma unroll 2
    for (int at = thread * 16; at < size; at += TEAM * 16) ptx::copy_async16(to + at, block.run + at);
  }
#endif
  // Begin to copy exact rows; keys, values (count, HEAD_DIM) f16.
  static KVRT_INLINE void fetch(u8* to, const u8* keys, const u8* values, int count, int thread) {
    constexpr int CHUNKS_A_ROW = HEAD_DIM / 8;
#pragma unroll 1
    for (int i = thread; i < count * CHUNKS_A_ROW; i += TEAM) {
      ptx::copy_async16(to + i / CHUNKS_A_ROW * EXACT_PITCH + i % CHUNKS_A_ROW * 16, keys + i * 16);
      ptx::copy_async16(to + EXACT_VALUES + i * 16, values + i * 16);
    }
  }

  // Make the query of a block. Returns the exponent of what codes of keys are weighed by.
  KVRT_INLINE int fold_query(const ZoneBlock& block, const OwnChannels& channels, const Query& query) {
    const u32* meta = reinterpret_cast<const u32*>(bytes + block.key_meta(HEAD_DIM));
    const int coded = block.widths.coded(), halves = block.widths.of(0);
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < (HEAD_DIM + WARP - 1) / WARP; ++i) {
      const int j = thread % WARP + i * WARP;
      if (j < coded) largest = max(largest, meta[j] & 0xFFFF);
    }
    const int exponent = HALVES - 1 - exponent_of(__reduce_max_sync(ALL_LANES, largest));
    // All is read before any is written: the compiler does not know that these are other places.
    float2 levels[OwnChannels::MOST];
    float q[OwnChannels::MOST][HEADS], minima[HEADS] = {};
#pragma unroll
    for (int i = 0; i < OwnChannels::MOST; ++i) {
      const int j = thread + i * TEAM;
      levels[i] = {power(HALVES - 1), 0.0f};
      if (j >= halves && j < halves + coded) {
        levels[i] = ptx::unpack_half(meta[j - halves]);
        levels[i].x *= power(exponent);
      }
#pragma unroll
      for (int h = 0; h < HEADS; ++h) q[i][h] = query.channels[channels.of[i]][h];
    }
#pragma unroll
    for (int i = 0; i < OwnChannels::MOST; ++i) {
      const int j = thread + i * TEAM;
      if (j >= halves + coded) break;
      float x[HEADS];
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        x[h] = q[i][h] * levels[i].x;
        minima[h] = fmaf(q[i][h], levels[i].y, minima[h]);
      }
      space.query.put(j, x);
    }
    const int lane = thread % WARP, share = WARP / HEADS;
    const float minimum = spread_sum(minima, lane);
    if (lane % share == 0) space.minima[thread / WARP][lane / share] = minimum;
    return exponent;
  }
  // Make that of exact rows.
  KVRT_INLINE void fold_query(const Query& query) {
    for (int c = thread; c < HEAD_DIM; c += TEAM) {
      float x[HEADS];
#pragma unroll
      for (int h = 0; h < HEADS; ++h) x[h] = query.channels[c][h] * power(HALVES - 1);
      space.query.put(c, x);
    }
  }

  // Scores of a block's tokens from `first` on; `exponent` is of `fold_query`.
  KVRT_INLINE void score(float (&scores)[2][4], const ZoneBlock& block, int first, int exponent, const Query& query) {
    const u32 rows = block.rows(), quad = min(u32(first + thread % WARP / 4 * 4), rows - 4);
    const u8* codes = bytes + block.key_codes(HEAD_DIM);
    float sums[1][2][4] = {};
    int end = 0;
    add_keys<16>(sums, codes, end, block.widths.of(0), quad, rows);
    if (end)
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[0][m][i] *= power(exponent - 24 - (HALVES - 1));
    add_keys<8>(sums, codes, end, block.widths.of(1), quad, rows);
    add_keys<4>(sums, codes, end, block.widths.of(2), quad, rows);
    add_keys<2>(sums, codes, end, block.widths.of(3), quad, rows);
    finish(scores, sums[0], query, power(24 - exponent), true);
  }

  // Scores of exact rows.
  KVRT_INLINE void score(float (&scores)[2][4], const Query& query) {
    const int lane = thread % WARP;
    // Matrices: tokens 4 i + 2 m, then 4 i + 2 m + 1, of eight channels, then of eight more.
    const u8* rows = bytes + (lane % 8 * 4 + lane / 8 % 2) * EXACT_PITCH + lane / 16 * 16;
    float sums[2][4] = {};
#pragma unroll 2
    for (int c = 0; c < HEAD_DIM; c += 16) {
      Fragments b;
      b.load(space.query, c + lane % 16, lane);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        u32 a[4];
        ptx::load_matrix4(a, rows + 2 * m * EXACT_PITCH + c * 2);
        multiply(sums[m], a[0], a[1], a[2], a[3], b);
      }
    }
    finish(scores, sums, query, power(1 - HALVES), false);
  }

 private:
  // Channels of one width, of which there are `count` from number `end` on; codes lie at `codes`.
  template <int WIDTH>
  KVRT_INLINE void add_keys(float (&sums)[1][2][4], const u8*& codes, int& end, int count, u32 quad, u32 rows) {
    const int pitch = rows * WIDTH / 8, first = end;
    end += count;
    add_lines<WIDTH, 4, 0>(sums, codes + quad * WIDTH / 8, pitch, first, end, space.query, [](int j) { return j; },
                            thread % WARP);
    codes += count * pitch;
  }

  // Scores from what the tensor cores added up.
  KVRT_INLINE void finish(float (&scores)[2][4], const float (&sums)[2][4], const Query& query, float factor,
                          bool shifted) {
    float unit[2], shift[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int head = (2 * (thread % 4) + n) % HEADS;
      unit[n] = query.units[head];
      shift[n] = shifted ? (space.minima[0][head] + space.minima[1][head]) * unit[n] : 0.0f;
      unit[n] *= factor;
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float sum = sums[m][i];
        if (HEADS == 4) sum += __shfl_xor_sync(ALL_LANES, sum, 2);  // of halves, and of rests
        scores[m][i] = fmaf(sum, unit[i % 2], shift[i % 2]);
      }
  }
};
