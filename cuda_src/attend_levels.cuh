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
      // Four nibbles of either half are the registers' codes.
      find(a[0], a[1], word, 0x20);
      find(a[2], a[3], word, 0x31);
    } else {
      u32 even = word & 0x33333333u, odd = word >> 2 & 0x33333333u;
      if (BITS == 3) {
        even |= codes.tops[j] << 2 & 0x44444444u;
        odd |= codes.tops[j] & 0x44444444u;
      }
      const u32 bytes = s & 1 ? 0x31 : 0x20;
      find(a[0], a[2], even, bytes);
      find(a[1], a[3], odd, bytes);
    }
  }

 private:
  // Levels of the nibbles that two bytes of a word have, one byte from either half of it.
  KVRT_INLINE void find(u32& first, u32& second, u32 nibbles, u32 bytes) const {
    u32 selector = ptx::prmt(nibbles, 0, bytes), upper = 0;
    if (BITS == 4) {
      upper = ptx::prmt(0x0000FF00u, 0, selector >> 3 & 0x1111u);  // all bits of a byte where the code is 8 or more
      selector &= 0x7777u;
    }
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
