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
    const u32 word = word_of(codes.first, j);
    if (BITS == 4) {
      // Four nibbles of either half are the registers' codes; a byte's sign is a code's highest bit.
      const u32 nibbles = word & 0x77777777u, even = word << 4;
      find(a[0], a[1], ptx::prmt(nibbles, 0, 0x20), ptx::prmt(even, word, 0xEAC8));
      find(a[2], a[3], ptx::prmt(nibbles, 0, 0x31), ptx::prmt(even, word, 0xFBD9));
    } else if (BITS == 3) {
      const u32 even = (word & 0x33333333u) | (codes.tops[j] << 2 & 0x44444444u);
      const u32 odd = (word >> 2 & 0x33333333u) | (codes.tops[j] & 0x44444444u);
      const u32 bytes = s & 1 ? 0x31 : 0x20;
      find(a[0], a[2], ptx::prmt(even, 0, bytes), 0);
      find(a[1], a[3], ptx::prmt(odd, 0, bytes), 0);
    } else {
      // Both halves of tile s - s % 2, then those of the next. A level's bytes come together: the selectors are the
      // code in the low table and the code in the high one. A product shifts, and in another pipe than prmt's.
      const u32 bytes = ptx::prmt(word, 0, 0x3120);
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
  using Low = typename Codes<BITS>::Low;
  u32 code = Low::code(codes, s, j, lane, reg, one);
  if (BITS == 3) code |= Plane<1>::code(codes + Low::BYTES, s, j, lane, reg, one) << 2;
  return u16(levels[code] | levels[16 + code] << 8);
}
