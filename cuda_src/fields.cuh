// Codes in fragment order as A operands of mma.m16n8k16, one instruction for two codes.
//
// A field of a 16-bit half below bit 10 is a subnormal half: code * 2^-24, times a power of two for where it lies.
// Tensor cores take those exactly, so codes need no conversion: AND alone. The powers go to B (columns 8 ... 15 of a
// tile) and to the sums (rows 8 ... 15); all of it times 2^24. Where codes must be numbers, `make_integers` does it.
#pragma once
#include "common.cuh"

static constexpr float FROM_SUBNORMAL = 16777216.0f;

KVRT_INLINE u32 word_of(const uint4& words, int j) {
  return j == 0 ? words.x : j == 1 ? words.y : j == 2 ? words.z : words.w;
}

// One plane of BITS (1, 2, 4 or 8) bits of a side's codes; see kvrt/kvstore/fragment.py.
template <int BITS>
struct Plane {
  static constexpr int TILES = HEAD_DIM / 16;
  static constexpr int TILES_A_WORD = BITS == 8 ? 1 : 4 / BITS;
  static constexpr int WHOLE = TILES * BITS / 4;  // units of 16 bytes a lane
  static constexpr int BYTES = HEAD_DIM * 64 * BITS / 8;
  // How much columns 8 ... 15, rows 8 ... 15 and the second tile below bit 8 weigh more than what is first.
  static constexpr float HIGH_COLUMNS = BITS == 1 ? 4.0f : BITS == 2 ? 16.0f : 1.0f;
  static constexpr float HIGH_ROWS = BITS == 1 ? 2.0f : BITS == 2 ? 4.0f : BITS == 4 ? 16.0f : 1.0f;
  static constexpr float SECOND_TILE = BITS == 1 ? 16.0f : 1.0f;

  // The words of j = 0 ... 3 that hold tile s (8 bits: registers 0, 1 with half 0; 2, 3 with half 1).
  static KVRT_INLINE uint4 load(const u8* codes, int s, int half) {
    const int lane = threadIdx.x % WARP, unit = BITS == 8 ? 2 * s + half : s / TILES_A_WORD;
    if (BITS == 8 || unit < WHOLE) return *reinterpret_cast<const uint4*>(codes + unit * 512 + lane * 16);
    return narrow(codes + WHOLE * 512);
  }

  static KVRT_INLINE uint4 narrow(const u8* place) {
    const int lane = threadIdx.x % WARP;
    u32 words[4] = {0, 0, 0, 0};
    int s = WHOLE * TILES_A_WORD;
    while (s < TILES) {
      int size = 16;
      while (size > 4 * BITS * (TILES - s)) size /= 2;
      const int shift = s * BITS * 4 & 15, bytes = size / 4;
      const u32 mask = (1u << size) - 1;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 word = 0;
        for (int byte = 0; byte < bytes; ++byte) word |= u32(place[(lane * 4 + j) * bytes + byte]) << 8 * byte;
        words[j] |= (word & mask) << shift | (word >> size & mask) << (16 + shift);
      }
      place += WARP * size;
      s += size / (4 * BITS);
    }
    return {words[0], words[1], words[2], words[3]};
  }

  // The four registers of tile s.
  static KVRT_INLINE void tile(u32 (&a)[4], u32 first, u32 second, int s) {
    if (BITS == 8) {
      a[0] = first & 0x00FF00FFu;
      a[1] = first >> 8 & 0x00FF00FFu;
      a[2] = second & 0x00FF00FFu;
      a[3] = second >> 8 & 0x00FF00FFu;
    } else if (BITS == 4) {
      a[0] = first & 0x000F000Fu;
      a[1] = first & 0x00F000F0u;
      a[2] = first >> 8 & 0x000F000Fu;
      a[3] = first >> 8 & 0x00F000F0u;
    } else if (BITS == 2) {
      const u32 word = s & 1 ? first >> 8 : first;
#pragma unroll
      for (int r = 0; r < 4; ++r) a[r] = word & 0x00030003u << 2 * r;
    } else {
      const u32 word = s & 2 ? first >> 8 : first;
#pragma unroll
      for (int r = 0; r < 4; ++r) a[r] = word & 0x00010001u << ((s & 1) * 4 + r);
    }
  }

  // What B is multiplied by in tile s, columns 0 ... 7 and 8 ... 15.
  static KVRT_INLINE float low_columns(int s) { return BITS == 1 && s & 1 ? 1.0f / SECOND_TILE : 1.0f; }
  static KVRT_INLINE float high_columns(int s) { return low_columns(s) / HIGH_COLUMNS; }

  // One code (of up to 4 bits): that of half `one` of a register of a lane, tile (s, j).
  static KVRT_INLINE u32 code(const u8* codes, int s, int j, int lane, int reg, int one) {
    const u8* place = codes + s / TILES_A_WORD * 512;
    int size = 16, first = s / TILES_A_WORD * TILES_A_WORD;
    if (TILES * BITS % 4 != 0 && s / TILES_A_WORD >= WHOLE) {
      place = codes + WHOLE * 512;
      first = WHOLE * TILES_A_WORD;
      while (true) {
        while (size > 4 * BITS * (TILES - first)) size /= 2;
        if (s < first + size / (4 * BITS)) break;
        place += WARP * size;
        first += size / (4 * BITS);
      }
    }
    const int bit = ((s - first) * 4 + reg) * BITS + size * one;
    return place[(lane * 4 + j) * (size / 4) + bit / 8] >> bit % 8 & ((1 << BITS) - 1);
  }
};

// Codes of 2, 3, 4 or 8 bits as one field each, of tile s and all four j. To join the two planes of three bits takes
// more than a second multiplication, so this is for codes that must become numbers.
template <int BITS>
struct Codes {
  using Low = Plane<BITS == 3 ? 2 : BITS>;
  uint4 first, second;
  // The third bits of tile s and its neighbour, each where the first bit of its code is in the other plane.
  u32 tops[BITS == 3 ? 4 : 1];

  // Take up tile s; three bits: after that of s - 1, where s is odd.
  KVRT_INLINE void load(const u8* codes, int s) {
    first = Low::load(codes, s, 0);
    second = BITS == 8 ? Low::load(codes, s, 1) : first;
    if (BITS == 3 && s % 2 == 0) {
      const uint4 top = Plane<1>::load(codes + Low::BYTES, s, 0);
#pragma unroll
      for (int j = 0; j < 4; ++j) tops[j] = spread(s & 2 ? word_of(top, j) >> 8 : word_of(top, j));
    }
  }

  // Bit b of either half's low byte goes to bit 2 b of the half.
  static KVRT_INLINE u32 spread(u32 x) {
    x &= 0x00FF00FFu;
    x = (x | x << 4) & 0x0F0F0F0Fu;
    x = (x | x << 2) & 0x33333333u;
    return (x | x << 1) & 0x55555555u;
  }

  // The four registers of tile (s, j).
  KVRT_INLINE void tile(u32 (&a)[4], int j, int s) const {
    Low::tile(a, word_of(first, j), word_of(second, j), s);
    if (BITS == 3) {
      const u32 top = s & 1 ? tops[j] >> 6 : tops[j] << 2;
#pragma unroll
      for (int r = 0; r < 4; ++r) a[r] |= top & 0x00040004u << 2 * r;
    }
  }

  // What register r of a tile weighs.
  static KVRT_INLINE float weight(int r) {
    return (r & 1 ? Low::HIGH_ROWS : 1.0f) * (r & 2 ? Low::HIGH_COLUMNS : 1.0f);
  }
};

// A number that a half holds exactly (no subnormal, no zero), twice; known when compiling where x is.
KVRT_INLINE u32 exact_half2(float x) {
  const u32 bits = __float_as_uint(x), half = (bits >> 16 & 0x8000u) | ((bits >> 13 & 0x3FFFFu) - (112u << 10));
  return half | half << 16;
}

static constexpr u32 ONES = 0x3C003C00u;  // two halves 1.0

KVRT_INLINE u32 scale_half2(u32 x, float factor) { return factor == 1.0f ? x : ptx::mul_half2(x, exact_half2(factor)); }

// Fields become halves: code - middle, exactly. `thousand` are two halves 1024.
template <int BITS>
KVRT_INLINE void make_integers(u32 (&a)[4], int middle, u32 thousand) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float weight = Codes<BITS>::weight(r);
    // With the exponent of 1024 a field is 1024 + code * weight.
    const u32 minus = exact_half2(-1024.0f / weight - middle) + (thousand - 0x64006400u);
    a[r] = ptx::fma_half2(a[r] | thousand, exact_half2(1.0f / weight), minus);
  }
}

// A tile of sums of a plane's codes, times a weight.
template <int BITS>
KVRT_INLINE void add_weighted(float (&to)[4], const float (&sums)[4], float weight) {
  to[0] += sums[0] * weight;
  to[1] += sums[1] * weight;
  to[2] += sums[2] * (weight / Plane<BITS>::HIGH_ROWS);
  to[3] += sums[3] * (weight / Plane<BITS>::HIGH_ROWS);
}

// 8-bit floats as halves: e4m3 comes out 2^-8 of its value.
template <bool E4M3>
KVRT_INLINE void minifloats(u32 (&a)[2], u32 word) {
  if (E4M3) {
    a[0] = (word & 0x00800080u) << 8 | (word & 0x007F007Fu) << 7;
    a[1] = (word & 0x80008000u) | (word >> 1 & 0x3F803F80u);
  } else {
    a[0] = word << 8 & 0xFF00FF00u;
    a[1] = word & 0xFF00FF00u;
  }
}
