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

// Codes of BITS (2, 4, 8; 3 below) bits of a side, as one field each: those of tile s and all four j.
// See kvrt/kvstore/fragment.py.
template <int BITS>
struct Codes {
  static constexpr int TILES = HEAD_DIM / 16;
  static constexpr int TILES_A_WORD = BITS == 8 ? 1 : 4 / BITS;
  static constexpr int WHOLE = TILES * BITS / 4;  // units of 16 bytes a lane
  // How much fields of rows 8 ... 15, and of columns 8 ... 15, weigh more than those before.
  static constexpr float HIGH_ROWS = BITS == 2 ? 4.0f : BITS == 4 ? 16.0f : 1.0f;
  static constexpr float HIGH_COLUMNS = BITS == 2 ? 16.0f : 1.0f;
  uint4 first, second;  // the words of j = 0 ... 3 (8 bits: registers 0, 1; 2, 3)

  KVRT_INLINE void load(const u8* codes, int s) {
    first = words(codes, BITS == 8 ? 2 * s : s / TILES_A_WORD);
    second = BITS == 8 ? words(codes, 2 * s + 1) : first;
  }

  // The four registers of tile (s, j).
  KVRT_INLINE void tile(u32 (&a)[4], int j, int s) const {
    const u32 low = word_of(first, j), high = word_of(second, j);
    if (BITS == 8) {
      a[0] = low & 0x00FF00FFu;
      a[1] = low >> 8 & 0x00FF00FFu;
      a[2] = high & 0x00FF00FFu;
      a[3] = high >> 8 & 0x00FF00FFu;
    } else if (BITS == 4) {
      a[0] = low & 0x000F000Fu;
      a[1] = low & 0x00F000F0u;
      a[2] = low >> 8 & 0x000F000Fu;
      a[3] = low >> 8 & 0x00F000F0u;
    } else {
      const u32 word = s & 1 ? low >> 8 : low;
#pragma unroll
      for (int r = 0; r < 4; ++r) a[r] = word & 0x00030003u << 2 * r;
    }
  }

  // Of the codes in memory, the word j of tile s (2, 4 bits).
  static KVRT_INLINE u32 word(const u8* codes, int s, int j) {
    const int unit = s / TILES_A_WORD, lane = threadIdx.x % WARP;
    if (unit < WHOLE) return *reinterpret_cast<const u32*>(codes + unit * 512 + lane * 16 + j * 4);
    return ptx::prmt(*reinterpret_cast<const u16*>(codes + unit * 512 + lane * 8 + j * 2), 0, 0x4140);
  }

  // What register r of tile (s, j) weighs.
  static KVRT_INLINE float weight(int r, int j) { return (r & 1 ? HIGH_ROWS : 1.0f) * (r & 2 ? HIGH_COLUMNS : 1.0f); }

 private:
  static KVRT_INLINE uint4 words(const u8* codes, int unit) {
    const int lane = threadIdx.x % WARP;
    if (BITS == 8 || unit < WHOLE) return *reinterpret_cast<const uint4*>(codes + unit * 512 + lane * 16);
    // Two bits: of the last tile, where it is alone, words are halves.
    const uint2 two = *reinterpret_cast<const uint2*>(codes + unit * 512 + lane * 8);
    return {ptx::prmt(two.x, 0, 0x4140), ptx::prmt(two.x, 0, 0x4342), ptx::prmt(two.y, 0, 0x4140),
            ptx::prmt(two.y, 0, 0x4342)};
  }
};

// Three bits: three words hold a tile s. Word j < 3 has the registers of tile (s, j) at the bits 0, 9, 3, 12 of either
// half. At bit 6 are the registers 0 ... 2 of tile (s, 3), and bits 15 are those of the codes of its last register.
template <>
struct Codes<3> {
  // Of tile (s, 3), columns weigh the same.
  static constexpr float HIGH_ROWS = 1.0f, HIGH_COLUMNS = 8.0f;
  u32 words[3];

  KVRT_INLINE void load(const u8* codes, int s) {
#pragma unroll
    for (int i = 0; i < 3; ++i) words[i] = word(codes, s, i);
  }

  // Of the codes in memory, the word i of tile s.
  static KVRT_INLINE u32 word(const u8* codes, int s, int i) {
    return reinterpret_cast<const u32*>(codes)[(3 * s + i) * WARP + threadIdx.x % WARP];
  }

  KVRT_INLINE void tile(u32 (&a)[4], int j, int s) const {
    if (j < 3) {
      const u32 word = words[j], above = word >> 9;
      a[0] = word & 0x00070007u;
      a[1] = above & 0x00070007u;
      a[2] = word & 0x00380038u;
      a[3] = above & 0x00380038u;
    } else {
      u32 bits[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        a[i] = words[i] & 0x01C001C0u;
        bits[i] = words[i] >> 9 & 0x00400040u;
      }
      // A sum of halves: exact, and in another pipe than what finds fields.
      a[3] = ptx::fma_half2(bits[2], 0x44004400u, ptx::fma_half2(bits[1], 0x40004000u, bits[0]));
    }
  }

  static KVRT_INLINE float weight(int r, int j) { return j == 3 ? 64.0f : r & 2 ? 8.0f : 1.0f; }
};

// What B is multiplied by in a tile (s, j), columns 0 ... 7 and 8 ... 15.
template <int BITS>
KVRT_INLINE float low_columns(int j) {
  return 1.0f / Codes<BITS>::weight(0, j);
}
template <int BITS>
KVRT_INLINE float high_columns(int j) {
  return 1.0f / Codes<BITS>::weight(2, j);
}

// A number that a half holds exactly (no subnormal, no zero), twice; known when compiling where x is.
KVRT_INLINE u32 exact_half2(float x) {
  const u32 bits = __float_as_uint(x), half = (bits >> 16 & 0x8000u) | ((bits >> 13 & 0x3FFFFu) - (112u << 10));
  return half | half << 16;
}

static constexpr u32 ONES = 0x3C003C00u;  // two halves 1.0

KVRT_INLINE u32 scale_half2(u32 x, float factor) { return factor == 1.0f ? x : ptx::mul_half2(x, exact_half2(factor)); }

// Fields become halves: code - middle, exactly. `thousand` are two halves 1024.
template <int BITS>
KVRT_INLINE void make_integers(u32 (&a)[4], int j, int middle, u32 thousand) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float weight = Codes<BITS>::weight(r, j);
    // With the exponent of 1024 a field is 1024 + code * weight.
    const u32 minus = exact_half2(-1024.0f / weight - middle) + (thousand - 0x64006400u);
    a[r] = ptx::fma_half2(a[r] | thousand, exact_half2(1.0f / weight), minus);
  }
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
