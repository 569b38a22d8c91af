// One unit of attention over zones, by a team of four warps: a block of a zone, or up to 64 exact rows of the tail.
//
// Its bytes lie in shared memory. Numbers of four tokens (K) or four channels (V) of one width are read at a time, and
// codes become floats by the bits of 2^23. A block's scales and minima go to the query and to the weights, so that
// codes alone are summed. Channels and tokens are sorted by width: lanes of a warp part only where two widths meet.
#pragma once
#include "attend_merge.cuh"
#include "zone_block.cuh"

static constexpr int TEAM = 128, TEAM_WARPS = TEAM / WARP;
static constexpr int KEY_QUADS = BLOCK_TOKENS / 4, KEY_PARTS = TEAM / KEY_QUADS;  // of tokens; of channels
static constexpr int VALUE_QUADS = HEAD_DIM / 4, VALUE_PARTS = TEAM / VALUE_QUADS;  // of channels; of tokens
static constexpr int EXACT_PITCH = HEAD_DIM * 2 + 16;  // bytes of a row of exact keys: 8 rows meet all banks
static constexpr int EXACT_VALUES = BLOCK_TOKENS * EXACT_PITCH;
static constexpr int UNIT_BYTES = EXACT_VALUES + BLOCK_TOKENS * HEAD_DIM * 2;  // no block has more

// Channels or tokens that a thread has under way; one where registers are few.
static constexpr int AT_ONCE = HEADS == 8 ? 1 : 2;

// Four numbers of WIDTH bits as floats.
template <int WIDTH>
KVRT_INLINE void read_four(float (&x)[4], const u8* place) {
  constexpr u32 EXPONENT = 0x4B000000;  // of 2^23: its last bits are integers
  if (WIDTH == 16) {
    const u32* words = reinterpret_cast<const u32*>(place);  // may begin at any multiple of four bytes
    const float2 low = ptx::unpack_half(words[0]), high = ptx::unpack_half(words[1]);
    x[0] = low.x;
    x[1] = low.y;
    x[2] = high.x;
    x[3] = high.y;
  } else if (WIDTH == 8) {
    const u32 word = *reinterpret_cast<const u32*>(place);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(ptx::prmt(word, EXPONENT, 0x7540 | i)) - 8388608.0f;
  } else {
    const u32 word = WIDTH == 4 ? *reinterpret_cast<const u16*>(place) : *place;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float weight = float(1 << i * WIDTH), inverse = 1.0f / weight;
      const u32 field = word & ((1u << WIDTH) - 1) << i * WIDTH;
      x[i] = fmaf(__uint_as_float(field | EXPONENT), inverse, -8388608.0f * inverse);
    }
  }
}

// The numbers of a block's channels that a thread makes the query of.
struct OwnChannels {
  static constexpr int MOST = (HEAD_DIM + TEAM - 1) / TEAM;
  u32 of[MOST];

  KVRT_INLINE void read(const ZoneBlock& block, int thread) {
#pragma unroll
    for (int i = 0; i < MOST; ++i)
      if (thread + i * TEAM < block.widths.total()) of[i] = ptx::load_early(block.channels + thread + i * TEAM);
  }
};

// What a team has in shared memory beside a unit's bytes.
struct TeamSpace {
  float query[HEAD_DIM][HEADS];  // of kept channels, times their scales
  float scores[TEAM_WARPS][HEADS][BLOCK_TOKENS];
  float weights[BLOCK_TOKENS][HEADS];  // times the scales of values
  float minima[TEAM_WARPS][HEADS];     // what minima of keys add to all scores
  float shrink[HEADS];
};

// sums[h][i] += weights[h] * x[i].
KVRT_INLINE void add_products(float (&sums)[HEADS][4], const float (&x)[4], const float* weights) {
#pragma unroll
  for (int h = 0; h < HEADS; h += 4) {
    const float4 w = *reinterpret_cast<const float4*>(weights + h);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[h][i] = fmaf(w.x, x[i], sums[h][i]);
      sums[h + 1][i] = fmaf(w.y, x[i], sums[h + 1][i]);
      sums[h + 2][i] = fmaf(w.z, x[i], sums[h + 2][i]);
      sums[h + 3][i] = fmaf(w.w, x[i], sums[h + 3][i]);
    }
  }
}

// The unit of a team; `thread` is a number in the team.
struct Unit {
  const u8* bytes;
  TeamSpace& space;
  int thread;

  // Begin to copy a block's run.
  static KVRT_INLINE void fetch(u8* to, const ZoneBlock& block, int thread) {
    const int size = block.bytes(HEAD_DIM);
    for (int at = thread * 16; at < size; at += TEAM * 16) ptx::copy_async16(to + at, block.run + at);
  }
  // Begin to copy exact rows; keys, values (count, HEAD_DIM) f16.
  static KVRT_INLINE void fetch(u8* to, const u8* keys, const u8* values, int count, int thread) {
    constexpr int CHUNKS = HEAD_DIM / 8;
    for (int i = thread; i < count * CHUNKS; i += TEAM) {
      ptx::copy_async16(to + i / CHUNKS * EXACT_PITCH + i % CHUNKS * 16, keys + i * 16);
      ptx::copy_async16(to + EXACT_VALUES + i * 16, values + i * 16);
    }
  }

  // The query of a block, from `query` (HEAD_DIM, HEADS).
  KVRT_INLINE void fold_query(const ZoneBlock& block, const OwnChannels& channels, const float* query) {
    float minima[HEADS] = {};
    const u32* meta = reinterpret_cast<const u32*>(bytes + block.key_meta(HEAD_DIM));
#pragma unroll
    for (int i = 0; i < OwnChannels::MOST; ++i) {
      const int j = thread + i * TEAM, coded = j - block.widths.of(0);
      if (j >= block.widths.total()) break;
      float2 levels = {1.0f, 0.0f};
      if (coded >= 0) levels = ptx::unpack_half(meta[coded]);
#pragma unroll
      for (int h = 0; h < HEADS; h += 4) {
        const float4 x = *reinterpret_cast<const float4*>(query + channels.of[i] * HEADS + h);
        *reinterpret_cast<float4*>(&space.query[j][h]) = {x.x * levels.x, x.y * levels.x, x.z * levels.x,
                                                          x.w * levels.x};
        minima[h] = fmaf(x.x, levels.y, minima[h]);
        minima[h + 1] = fmaf(x.y, levels.y, minima[h + 1]);
        minima[h + 2] = fmaf(x.z, levels.y, minima[h + 2]);
        minima[h + 3] = fmaf(x.w, levels.y, minima[h + 3]);
      }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      minima[h] = warp_sum(minima[h]);
      if (thread % WARP == 0) space.minima[thread / WARP][h] = minima[h];
    }
  }

  // Scores of a block's tokens, in TEAM_WARPS parts.
  KVRT_INLINE void score(const ZoneBlock& block) {
    const int quad = thread % KEY_QUADS, rows = block.rows();
    float sums[HEADS][4] = {};
    if (4 * quad < rows) {
      const u8* codes = bytes + block.key_codes(HEAD_DIM);
      int j = thread / KEY_QUADS, end = 0;
      add_keys<16>(sums, codes, j, end, block.widths.of(0), quad, rows);
      add_keys<8>(sums, codes, j, end, block.widths.of(1), quad, rows);
      add_keys<4>(sums, codes, j, end, block.widths.of(2), quad, rows);
      add_keys<2>(sums, codes, j, end, block.widths.of(3), quad, rows);
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[h][i] += __shfl_xor_sync(ALL_LANES, sums[h][i], KEY_QUADS);
      if (thread % WARP < KEY_QUADS)
        *reinterpret_cast<float4*>(&space.scores[thread / WARP][h][4 * quad]) = {sums[h][0], sums[h][1], sums[h][2],
                                                                                sums[h][3]};
    }
  }

  // Scores of exact rows, in two parts, from `query` (HEAD_DIM, HEADS).
  KVRT_INLINE void score(const float* query, int count) {
    const int token = thread % BLOCK_TOKENS, part = thread / BLOCK_TOKENS;
    if (token >= count) return;
    float sums[HEADS] = {};
    for (int c = part * 8; c < HEAD_DIM; c += 16) {
      const uint4 words = *reinterpret_cast<const uint4*>(bytes + token * EXACT_PITCH + c * 2);
      const float2 x[4] = {ptx::unpack_half(words.x), ptx::unpack_half(words.y), ptx::unpack_half(words.z),
                           ptx::unpack_half(words.w)};
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
          sums[h] = fmaf(x[i].x, query[(c + 2 * i) * HEADS + h], sums[h]);
          sums[h] = fmaf(x[i].y, query[(c + 2 * i + 1) * HEADS + h], sums[h]);
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) space.scores[part][h][token] = sums[h];
  }

  // acc[h] of the thread's channels += weights * values; rows of `counts` at `values`.
  KVRT_INLINE void add_values(float (&sums)[HEADS][4], const Counts& counts, const u8* values) {
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[h][i] *= space.shrink[h];
    if (thread >= VALUE_QUADS * VALUE_PARTS) return;
    int t = thread / VALUE_QUADS, end = 0;
    add_rows<16>(sums, values, t, end, counts.of(0));
    add_rows<8>(sums, values, t, end, counts.of(1));
    add_rows<4>(sums, values, t, end, counts.of(2));
    add_rows<2>(sums, values, t, end, counts.of(3));
  }

 private:
  // Channels j, j + KEY_PARTS, ... of one width, of which there are `count` from number `end` on; codes lie at `codes`.
  template <int WIDTH>
  KVRT_INLINE void add_keys(float (&sums)[HEADS][4], const u8*& codes, int& j, int& end, int count, int quad,
                            int rows) {
    const int pitch = rows * WIDTH / 8, first = end;
    const u8* place = codes + (j - first) * pitch + quad * WIDTH / 2;
    end += count;
    codes += count * pitch;
#pragma unroll AT_ONCE
    for (; j < end; j += KEY_PARTS, place += KEY_PARTS * pitch) {
      float x[4];
      read_four<WIDTH>(x, place);
      add_products(sums, x, space.query[j]);
    }
  }

  // Tokens t, t + VALUE_PARTS, ... of one width.
  template <int WIDTH>
  KVRT_INLINE void add_rows(float (&sums)[HEADS][4], const u8*& values, int& t, int& end, int count) {
    constexpr int PITCH = HEAD_DIM * WIDTH / 8;
    const u8* place = values + (t - end) * PITCH + thread % VALUE_QUADS * WIDTH / 2;
    end += count;
    values += count * PITCH;
#pragma unroll AT_ONCE
    for (; t < end; t += VALUE_PARTS, place += VALUE_PARTS * PITCH) {
      float x[4];
      read_four<WIDTH>(x, place);
      add_products(sums, x, space.weights[t]);
    }
  }
};

// The running softmax of a team (Milakov and Gimelshein 2018): warp w has the heads w, w + TEAM_WARPS, ...
struct TeamSoftmax {
  static constexpr int EACH = HEADS / TEAM_WARPS;
  float peak[EACH], total[EACH], minimum[EACH];  // total, minimum: a lane's part of the sum, and of what minima of
                                                 // values add to all channels
  KVRT_INLINE TeamSoftmax() {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      peak[n] = NOTHING;
      total[n] = minimum[n] = 0;
    }
  }

  // Take up `count` tokens whose scores are in `parts` parts; those from `halves` on have scale and minimum at `meta`.
  KVRT_INLINE void step(TeamSpace& space, int warp, int parts, bool shifted, int count, int halves, const u32* meta) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int h = warp + n * TEAM_WARPS;
      float scores[2] = {NOTHING, NOTHING};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = lane + i * WARP;
        if (t >= count) continue;
        float sum = 0;
        if (shifted)
#pragma unroll
          for (int p = 0; p < TEAM_WARPS; ++p) sum += space.minima[p][h];
        for (int p = 0; p < parts; ++p) sum += space.scores[p][h][t];
        scores[i] = sum;
      }
      const float top = fmaxf(peak[n], warp_maximum(fmaxf(scores[0], scores[1])));
      const float shrink = ptx::exp2(peak[n] - top);
      peak[n] = top;
      total[n] *= shrink;
      minimum[n] *= shrink;
      if (lane == 0) space.shrink[h] = shrink;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = lane + i * WARP;
        if (t >= count) continue;
        float weight = ptx::exp2(scores[i] - top);
        total[n] += weight;
        if (t >= halves) {
          const float2 levels = ptx::unpack_half(meta[t - halves]);
          minimum[n] = fmaf(weight, levels.y, minimum[n]);
          weight *= levels.x;
        }
        space.weights[t][h] = weight;
      }
    }
  }
};
