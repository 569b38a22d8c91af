// Values of sealed pages: how much weight each entry of each book has, for four heads.
//
// Weights are whole numbers, so that shared memory adds them up by itself: of 2^31 a CTA's sum up to, so none of its
// words overflows. Rounding a weight moves it by 2^-32 of that sum at most; n tokens' move the result by n * 2^-32 of
// what it would be from them alone.
#pragma once
#include "rvq_lookup.cuh"

static constexpr int V_FURTHER = V_BITS - 8;
static constexpr int PIECE = 16;  // tokens whose codes a lane has at a time

// Codes of one book, of PIECE tokens.
struct ValueCodes {
  uint4 low;
  u32 further = 0;

  KVRT_INLINE void read(const u8* run, int book, int piece) {
    const u8* codes = run + V_CODES_OFFSET;
    low = ptx::load_stream(codes + PIECE * (V_STAGES * piece + book));
    if constexpr (V_FURTHER > 0) {
      const u8* behind = codes + PAGE_TOKENS * V_STAGES + 8 * V_FURTHER * book + 2 * V_FURTHER * piece;
      further = V_FURTHER == 1 ? *reinterpret_cast<const u16*>(behind) : *reinterpret_cast<const u32*>(behind);
    }
  }
  // Where the entry of token x of the piece lies in a turn's histogram.
  KVRT_INLINE u32 row(int x) const {
    const u32 word = x < 4 ? low.x : x < 8 ? low.y : x < 12 ? low.z : low.w;
    u32 at = ptx::prmt(word, 0, 0x4440 + x % 4) * (WARP * 4);
    if constexpr (V_FURTHER > 0) {
      constexpr int TO = 15;
      const int from = V_FURTHER * x;
      at |= (from <= TO ? further << (TO - from) : further >> (from - TO)) & ((1u << V_FURTHER) - 1) << TO;
    }
    return at;
  }
};

// A page's weights in shared memory, a warp's own: plane x has, of each token, the heads that lanes with lane / V_BOOKS
// == x add, one a turn.
struct PageWeights {
  static constexpr int PLANE = PAGE_TOKENS * TURNS * 4 + (TURNS == 2 ? 32 : 16);  // planes lie in different banks
  static constexpr int BYTES = AT_ONCE * PLANE;
  u8* place;

  // weights[u][h], as PageScores.
  KVRT_INLINE void write(const u32 (&weights)[2][HEADS]) const {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      u8* own = place + (8 * (lane / 4) + 4 * u + lane % 4) * TURNS * 4;
      const u32(&w)[HEADS] = weights[u];
#pragma unroll
      for (int x = 0; x < AT_ONCE; ++x)
        if constexpr (TURNS == 2)
          *reinterpret_cast<uint2*>(own + x * PLANE) = {w[2 * x], w[2 * x + 1]};
        else
          *reinterpret_cast<u32*>(own + x * PLANE) = w[x];
    }
  }

  // histogram += the weights of a piece's tokens. `at`: the lane's word of a row.
  KVRT_INLINE void add_piece(u8* histogram, const ValueCodes& codes, int piece) const {
    constexpr int EACH = 4 / TURNS;  // tokens of 16 bytes
    const u8* own = place + threadIdx.x % WARP / V_BOOKS * PLANE + piece * PIECE * TURNS * 4;
#pragma unroll
    for (int i = 0; i < PIECE; i += EACH) {
      const uint4 w = *reinterpret_cast<const uint4*>(own + i * TURNS * 4);
      const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        u8* row = histogram + codes.row(i + j);
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn)
          atomicAdd(reinterpret_cast<u32*>(row + turn * (V_ENTRIES * WARP * 4)), words[j * TURNS + turn]);
      }
    }
  }
};

// The lane's word of a row: of book b and head h, word AT_ONCE * b + h / TURNS of turn h % TURNS.
KVRT_INLINE int lane_word() {
  const int lane = threadIdx.x % WARP;
  return lane % V_BOOKS * AT_ONCE + lane / V_BOOKS;
}

KVRT_INLINE void clear_histogram(u8* histogram) {
  uint4* words = reinterpret_cast<uint4*>(histogram);
  for (int i = threadIdx.x; i < HISTOGRAM_BYTES / 16; i += THREADS) words[i] = {0, 0, 0, 0};
}

// What was written of a split so far, and the newest chunk of its pages, as parts of one `top`: that is a head's
// largest score and then some, so that all weights 2^(score - top) sum up to less than 1.
struct Chunk {
  float old_factor, factor;  // of what was written, and of the chunk's

  KVRT_INLINE void begin(float2& all, const float2& own, bool is_first) {
    if (is_first) {
      all = own;
      old_factor = 0;
      factor = 1;
      return;
    }
    const float top = fmaxf(all.x, own.x);
    old_factor = ptx::exp2(all.x - top);
    factor = ptx::exp2(own.x - top);
    float total = all.y * old_factor + own.y * factor;
    const bool over = total >= 1;
    const float half = over ? 0.5f : 1.0f;
    old_factor *= half;
    factor *= half;
    all = {over ? top + 1 : top, total * half};
  }
};

// Write a histogram down, of books from `first_book` on: a split's part of (V_STAGES, splits, V_ENTRIES, HEADS) f16.
KVRT_INLINE void write_histogram(u16* to, const u8* histogram, int first_book, int splits, const Chunk* chunks,
                                 bool is_first) {
  constexpr int EACH = 4;  // entries: 32 bytes
  const int books = min(V_BOOKS, V_STAGES - first_book);
  for (int i = threadIdx.x; i < V_BOOKS * (V_ENTRIES / EACH); i += THREADS) {
    const int book = i % V_BOOKS, entry = i / V_BOOKS * EACH;
    if (book >= books) continue;
    uint4* place = reinterpret_cast<uint4*>(to + (i64(first_book + book) * splits * V_ENTRIES + entry) * HEADS);
    u32 old[2 * EACH] = {}, out[2 * EACH];
    if (!is_first) {
      const uint4 a = place[0], b = place[1];
      old[0] = a.x, old[1] = a.y, old[2] = a.z, old[3] = a.w, old[4] = b.x, old[5] = b.y, old[6] = b.z, old[7] = b.w;
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      u32 words[HEADS];
      const u8* row = histogram + (entry + e) * (WARP * 4) + book * AT_ONCE * 4;
#pragma unroll
      for (int turn = 0; turn < TURNS; ++turn) {
        const u32* from = reinterpret_cast<const u32*>(row + turn * (V_ENTRIES * WARP * 4));
#pragma unroll
        for (int x = 0; x < AT_ONCE; ++x) words[x * TURNS + turn] = from[x];
      }
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        float x = float(words[2 * pair]) * (chunks[2 * pair].factor * (WRITTEN * 0x1p-31f));
        float y = float(words[2 * pair + 1]) * (chunks[2 * pair + 1].factor * (WRITTEN * 0x1p-31f));
        if (!is_first) {
          const float2 before = ptx::unpack_half(old[2 * e + pair]);
          x += before.x * chunks[2 * pair].old_factor;
          y += before.y * chunks[2 * pair + 1].old_factor;
        }
        out[2 * e + pair] = ptx::pack_half(x, y);
      }
    }
    place[0] = {out[0], out[1], out[2], out[3]};
    place[1] = {out[4], out[5], out[6], out[7]};
  }
}
