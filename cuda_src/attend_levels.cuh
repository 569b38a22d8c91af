// Non-uniform integers: codes become levels, as halves, by byte permutation of tables that are in registers.
#pragma once
#include "attend_tables.cuh"

// The levels of codes of BITS (2, 3, 4) bits: their low bytes and their high bytes.
template <int BITS>
struct Levels {
  uint4 low, high;

  KVRT_INLINE explicit Levels(const u8* bytes) {
    low = *reinterpret_cast<const uint4*>(bytes);
    high = *reinterpret_cast<const uint4*>(bytes + 16);
  }

  // The four registers of tile (s, j).
  KVRT_INLINE void tile(u32 (&a)[4], const Codes<BITS>& codes, int j, int s) const {
    if constexpr (BITS == 4) {
      const u32 word = word_of(codes.first, j);
      // Four nibbles of either half are the registers' codes; a byte's sign is a code's highest bit.
      const u32 nibbles = word & 0x77777777u, even = word << 4;
      find(a[0], a[1], ptx::prmt(nibbles, 0, 0x20), ptx::prmt(even, word, 0xEAC8));
      find(a[2], a[3], ptx::prmt(nibbles, 0, 0x31), ptx::prmt(even, word, 0xFBD9));
    } else if constexpr (BITS == 3) {
      // Two registers become the nibbles of a byte of either half.
      if (j < 3) {
        const u32 word = codes.words[j], bytes = ptx::prmt(word, word >> 9, 0x6420);
        const u32 nibbles = (bytes & 0x07070707u) + (bytes & 0x38383838u) * 2;
        find(a[0], a[2], nibbles, 0);
        find(a[1], a[3], nibbles >> 16, 0);
      } else {
        codes.tile(a, j, s);  // fields begin at bit 6
        find(a[0], a[2], ptx::prmt(a[0] * 4 + a[2] * 64, 0, 0x31), 0);
        find(a[1], a[3], ptx::prmt(a[1] * 4 + a[3] * 64, 0, 0x31), 0);
      }
    } else {
      // Both halves of tile s - s % 2, then those of the next. A level's bytes come together: the selectors are the
      // code in the low table and the code in the high one. A product shifts, and in another pipe than prmt's.
      const u32 bytes = ptx::prmt(word_of(codes.first, j), 0, 0x3120);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const u32 field = bytes & 0x03030303u << 2 * r;
        const unsigned long long selectors = field * (17ull << (16 - 2 * r)) + 0x404040400000ull;
        a[r] = ptx::prmt(low.x, high.x, u32(selectors >> (s & 1 ? 32 : 16)));
      }
    }
  }

 private:
  // Levels of four codes of three bits, one in a nibble; of four bits, those of 8 and more where `upper` has all bits
  // of a byte.
  KVRT_INLINE void find(u32& first, u32& second, u32 selector, u32 upper) const {
    u32 l = ptx::prmt(low.x, low.y, selector), h = ptx::prmt(high.x, high.y, selector);
    if (BITS == 4) {
      l = (l & ~upper) | (ptx::prmt(low.z, low.w, selector) & upper);
      h = (h & ~upper) | (ptx::prmt(high.z, high.w, selector) & upper);
    }
    first = ptx::prmt(l, h, 0x6240);
    second = ptx::prmt(l, h, 0x7351);
  }
};

// The level of one code, that of half `one` of a register of a lane.
template <int BITS>
KVRT_INLINE u16 level_at(const u8* levels, const u8* codes, int s, int j, int lane, int reg, int one) {
  const u32 code = Codes<BITS>::code(codes, s, j, lane, reg, one);
  return u16(levels[code] | levels[16 + code] << 8);
}
