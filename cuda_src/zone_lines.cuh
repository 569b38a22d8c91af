// Products of a block's lines with weights, by tensor cores: of channels of keys with the query, of rows of values with
// the weights of the softmax.
//
// A line is a row of numbers of one width. Numbers along lines are M: a lane has NEAR neighbours, so that they are few
// loads. Lines are K, 16 at a time, and query heads N: of four heads, halves and what halves lose of them are the eight
// columns, so that products are as exact as with floats; of eight, both are multiplied one after the other.
//
// A code in the last bits of a half is a subnormal, code * 2^-24, which tensor cores take exactly: codes become
// operands by shift and mask alone. Sums of codes are times 2^-24 therefore.
#pragma once
#include "zone_block.cuh"

static constexpr int SPLITS = HEADS / 4;  // products for a line: halves and rest in one, or one after the other

// The power of two of an exponent from -126 on.
KVRT_INLINE float power(int exponent) { return __uint_as_float(u32(127 + exponent) << 23); }

// Weights of up to COUNT lines, as halves in shared memory: a row of 16 bytes is eight columns of a line. Of four query
// heads, halves then rests; of eight, those are two rows.
template <int COUNT>
struct Weights {
  u32 rows[SPLITS][COUNT + 1][4];  // the last one is of lines that there are not

  KVRT_INLINE void clear_last(int lane) {
    if (lane < 4 * SPLITS) rows[lane / 4][COUNT][lane % 4] = 0;
  }
  // All columns of a line.
  KVRT_INLINE void put(int line, const float (&x)[HEADS]) {
    u32 halves[HEADS / 2], rests[HEADS / 2];
#pragma unroll
    for (int i = 0; i < HEADS / 2; ++i) {
      halves[i] = ptx::pack_half(x[2 * i], x[2 * i + 1]);
      const float2 near = ptx::unpack_half(halves[i]);
      rests[i] = ptx::pack_half(x[2 * i] - near.x, x[2 * i + 1] - near.y);
    }
    if (HEADS == 4) {
      *reinterpret_cast<uint4*>(rows[0][line]) = {halves[0], halves[1], rests[0], rests[1]};
    } else {
      *reinterpret_cast<uint4*>(rows[0][line]) = {halves[0], halves[1], halves[2], halves[HEADS / 2 - 1]};
      *reinterpret_cast<uint4*>(rows[SPLITS - 1][line]) = {rests[0], rests[1], rests[2], rests[HEADS / 2 - 1]};
    }
  }
  // The columns 2 col and 2 col + 1 of a line; of four query heads the last four columns are the rests of the first.
  KVRT_INLINE void put_pair(int line, int col, float x, float y) {
    const u32 halves = ptx::pack_half(x, y);
    const float2 near = ptx::unpack_half(halves);
    if (HEADS == 4) {
      const float rest = col < 2 ? 0.0f : 1.0f;
      rows[0][line][col] = ptx::pack_half(fmaf(-rest, near.x, x), fmaf(-rest, near.y, y));
    } else {
      rows[0][line][col] = halves;
      rows[SPLITS - 1][line][col] = ptx::pack_half(x - near.x, y - near.y);
    }
  }
};

// Weights of 16 lines as B fragments.
struct Fragments {
  u32 words[SPLITS][2];

  // `row` is the row of the line whose address the lane gives: see `line_of_lane`.
  template <int COUNT>
  KVRT_INLINE void load(const Weights<COUNT>& weights, int row, int lane) {
    if (SPLITS == 1)
      ptx::load_matrix2_transposed(words[0], weights.rows[0][row]);
    else
      ptx::load_matrix4_transposed(words[0], weights.rows[lane / 16][row]);
  }
};

// Which of 16 lines a lane gives the address of, where lane (g, c) = lane / 4, lane % 4 has the lines c, c + 4, c + 8
// and c + 12 of an A fragment.
KVRT_INLINE int line_of_lane(int lane) {
  return lane / 8 % 2 * 8 + lane % 2 * 4 + lane % 8 / 2;
}

KVRT_INLINE void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, const Fragments& b) {
#pragma unroll
  for (int s = 0; s < SPLITS; ++s) ptx::mma_half(sums, a0, a1, a2, a3, b.words[s][0], b.words[s][1]);
}

// NEAR neighbours of WIDTH bits of a line, which are aligned as a whole, but if not WHOLE to four bytes at most.
template <int WIDTH, int NEAR, bool WHOLE>
struct Neighbours {
  static constexpr int BYTES = NEAR * WIDTH / 8, WORDS = (BYTES + 3) / 4;
  u32 words[WORDS];

  KVRT_INLINE void load(const u8* place) {
    if (BYTES == 1)
      words[0] = *place;
    else if (BYTES == 2)
      words[0] = *reinterpret_cast<const u16*>(place);
    else if (BYTES == 4 || !WHOLE)
#pragma unroll
      for (int i = 0; i < WORDS; ++i) words[i] = reinterpret_cast<const u32*>(place)[i];
    else if (BYTES == 8) {
      const uint2 two = *reinterpret_cast<const uint2*>(place);
      words[0] = two.x;
      words[WORDS - 1] = two.y;
    } else
#pragma unroll
      for (int i = 0; i + 3 < WORDS; i += 4) {
        const uint4 four = reinterpret_cast<const uint4*>(place)[i / 4];
        words[i] = four.x;
        words[i + 1] = four.y;
        words[i + 2] = four.z;
        words[i + 3] = four.w;
      }
  }
  // Number n of this line and of another as two halves.
  KVRT_INLINE u32 pair(const Neighbours& other, int n) const {
    const int word = n * WIDTH / 32, bit = n * WIDTH % 32;
    const u32 both = ptx::prmt(words[word], other.words[word], bit < 16 ? 0x5410 : 0x7632);
    return WIDTH == 16 ? both : both >> bit % 16 & ((1u << WIDTH % 16) - 1) * 0x10001u;
  }
};

// sums[k][m] += weights * the numbers 2 m and 2 m + 1 of each lane in the lines first ... end - 1, of one width: rows
// lane / 4 and 8 further of a tile. `lines` is where line `first` has the lane's first number; those of other k lie
// STEP numbers behind. Lines are `pitch` bytes apart; row_of(line) is where their weights are.
//
// Lines are taken 16 at a time. What lies behind the last one is read as codes, which weigh nothing.
template <int WIDTH, int NEAR, int STEP, int COUNT, int LINES, typename Rows>
KVRT_INLINE void add_lines(float (&sums)[COUNT][NEAR / 2][4], const u8* lines, int pitch, int first, int end,
                           const Weights<LINES>& weights, const Rows& row_of, int lane) {
  // Halves of sixteen neighbours and four lines would take more registers than there are.
  constexpr int AT_ONCE = WIDTH == 16 && NEAR > 8 ? (HEADS == 4 ? 8 : 4) : NEAR, PARTS_OF_NEAR = NEAR / AT_ONCE;
  const int mine = first + lane % 4;
  const u8* place = lines + lane % 4 * pitch;
#pragma unroll 1  // instructions are what limits it, more than waiting for what a round loads
  for (int done = 0; first + done < end; done += 16, place += 16 * pitch) {
    Fragments b;
    const int line = first + done + line_of_lane(lane);
    b.load(weights, line < end ? row_of(line) : LINES, lane);
#pragma unroll
    for (int part = 0; part < COUNT * PARTS_OF_NEAR; ++part) {
      const int k = part / PARTS_OF_NEAR, from = part % PARTS_OF_NEAR * AT_ONCE;
      Neighbours<WIDTH, AT_ONCE, (NEAR > 4)> x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Bits that are no codes may be a NaN, which a weight of zero does not help against.
        const int over = WIDTH == 16 ? max(mine + done + 4 * i - (end - 1), 0) : 0;
        x[i].load(place + (4 * i - over) * pitch + (k * STEP + from) * WIDTH / 8);
      }
#pragma unroll
      for (int m = 0; m < AT_ONCE / 2; ++m)
        multiply(sums[k][from / 2 + m], x[0].pair(x[1], 2 * m), x[0].pair(x[1], 2 * m + 1), x[2].pair(x[3], 2 * m),
                 x[2].pair(x[3], 2 * m + 1), b);
    }
  }
}
