// Scores of sealed keys: a lookup for each code, of four heads at once, summed up by tensor cores.
//
// A lane has the tokens 8 n ... 8 n + 7 of a page, n = lane / 4, of one book of each quad, q = lane % 4: the one whose
// turn it is, which is another for each of four n, so that lanes that read at once meet in no bank. Two tokens' entries
// are a lane's part of operand A as they come: of row n the first two heads, of row n + 8 the others, one token behind
// the other along K. B adds up the four books, and puts each token and head into a column of its own.
#pragma once
#include "rvq_shape.cuh"

static constexpr int K_FURTHER = K_BITS - 8;  // bits of a code that are none of its byte

// Codes of M quads of books of a page, 4, 2 or 1. Of books that make up no quad, lanes have none where there is none.
template <int M, int WIDTH>
struct KeyCodes {
  static constexpr int FURTHER_BYTES = M * K_FURTHER;
  u32 low[M][2];
  u32 further[(FURTHER_BYTES + 3) / 4 + (K_FURTHER == 0)];

  // `first`: the block's first book.
  KVRT_INLINE void read(const u8* run, int first) {
    const int lane = ptx::as_new(threadIdx.x) % WARP, q = lane % 4;
    const int own = WIDTH == 4 ? lane : WIDTH * (lane / 4) + (q < WIDTH ? q : 0);
    const u8* place = run + K_CODES_OFFSET + PAGE_TOKENS * first + own * 8;
#pragma unroll
    for (int i = 0; i < M; ++i) {
      const uint2 x = ptx::load_stream8(place + i * WARP * 8);
      low[i][0] = x.x;
      low[i][1] = x.y;
    }
    if constexpr (K_FURTHER > 0) {
      const u8* behind = run + K_CODES_OFFSET + PAGE_TOKENS * K_STAGES + 8 * K_FURTHER * first + own * FURTHER_BYTES;
      read_further(behind);
    }
  }

  // Where the entry of step i and token x lies in the table.
  KVRT_INLINE u32 row(int i, int x, u32 slot) const {
    u32 at = ptx::prmt(low[i][x / 4], 0, 0x4440 + x % 4) * ROW_BYTES + slot;
    if constexpr (K_FURTHER > 0) {
      constexpr int TO = 15;  // of the byte's, the first is bit 7
      constexpr u32 MASK = ((1u << K_FURTHER) - 1) << TO;
      const int bit = K_FURTHER * (8 * i + x), from = bit % 32;
      const u32 word = further[bit / 32];
      at |= (from <= TO ? word << (TO - from) : word >> (from - TO)) & MASK;
    }
    return at;
  }

 private:
  KVRT_INLINE void read_further(const u8* place) {
    if constexpr (FURTHER_BYTES == 8) {
      const uint2 x = ptx::load_stream8(place);
      further[0] = x.x;
      further[1] = x.y;
    } else if constexpr (FURTHER_BYTES == 4) {
      further[0] = *reinterpret_cast<const u32*>(place);
    } else if constexpr (FURTHER_BYTES == 2) {
      further[0] = *reinterpret_cast<const u16*>(place);
    } else {
      further[0] = *place;
    }
  }
};

// Operand B for the first two of four tokens, and for the others: columns 2 i and 2 i + 1 of the sums are token i's.
struct Selectors {
  u32 first[2], second[2];

  KVRT_INLINE Selectors() {
    const int column = ptx::as_new(threadIdx.x) % WARP / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      first[i] = of(column - 2 * i);
      second[i] = of(column - 4 - 2 * i);
    }
  }

 private:
  static KVRT_INLINE u32 of(int column) { return column == 0 ? 0x3C00u : column == 1 ? 0x3C000000u : 0; }
};

// Scores of a page: of the tokens 8 (lane / 4) + 4 u + lane % 4, u = 0 and 1, four heads each.
using PageScores = float[2][HEADS];

// scores += what the table has for the codes. `slots`: where a lane's quad of step i begins in a row.
template <int M, int WIDTH>
KVRT_INLINE void look_up(PageScores& scores, const KeyCodes<M, WIDTH>& codes, const u8* table, const u32 (&slots)[M],
                         const Selectors& selectors) {
#pragma unroll
  for (int u = 0; u < 2; ++u)  // outermost: half of the codes are no longer wanted when there are eight sums
#pragma unroll
    for (int i = 0; i < M; ++i)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int x = 4 * u + 2 * pair;
        const uint2 a = *reinterpret_cast<const uint2*>(table + codes.row(i, x, slots[i]));
        const uint2 b = *reinterpret_cast<const uint2*>(table + codes.row(i, x + 1, slots[i]));
        const u32(&chosen)[2] = pair ? selectors.second : selectors.first;
        ptx::mma_half(scores[u], a.x, a.y, b.x, b.y, chosen[0], chosen[1]);
      }
}

// Found anew for each block of books: they would take registers from block to block.
template <int M>
KVRT_INLINE void find_slots(u32 (&slots)[M]) {
  const int lane = ptx::as_new(threadIdx.x) % WARP, n = lane / 4, q = lane % 4;
#pragma unroll
  for (int i = 0; i < M; ++i) slots[i] = 8 * (4 * ((i + n) % M + M * (n / M % (4 / M))) + q);
}
