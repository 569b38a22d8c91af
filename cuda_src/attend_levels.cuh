// Non-uniform integers: codes become levels, as halves: looked up in shared memory, or, where that has no room, by byte
// permutation of tables that are in registers.
#pragma once
#include "attend_fitted.cuh"

// Four codes of registers r and r + 2 (two bits: r and r + 1) as nibbles of either half of a word, in the order of
// tiles, become bytes: those of a register's two halves together. So a byte is an entry of the table, and its place
// takes one more instruction. Codes of three bits lie otherwise, and their entries have six bits.
struct Entries {
  u32 even, odd;  // bytes 0, 1: of nibbles 0, 2; bytes 2, 3: of nibbles 1, 3

  KVRT_INLINE explicit Entries(u32 nibbles) {
    even = ptx::pick(0x0F0F0F0Fu, nibbles, nibbles >> 12);
    odd = ptx::pick(0x0F0F0F0Fu, nibbles << 12, nibbles);
  }
};

// Of three bits: a word of the tiles (s, 0 ... 2) as that of `tile_word`.
KVRT_INLINE u32 bytes_of_fields(u32 word) { return ptx::prmt(word, word >> 9, 0x6420); }

// The codes of tile (s, j) in one word. Two and four bits: as in memory. Three bits: a byte of each half of registers 0
// and 2, then of 1 and 3, with other bits above them.
template <int BITS>
KVRT_INLINE u32 tile_word(const Codes<BITS>& codes, int j) {
  if constexpr (BITS == 3) {
    const u32(&w)[3] = codes.words;
    if (j < 3) return bytes_of_fields(w[j]);
    constexpr u32 FIELDS = 0x01C001C0u;
    const u32 last = ptx::pick(0x06000600u, ptx::pick(0x02000200u, w[0] >> 6, w[1] >> 5), w[2] >> 4);
    return ptx::prmt(ptx::pick(FIELDS, w[0], w[2] << 3) >> 6, ptx::pick(FIELDS, w[1], last) >> 6, 0x6420);
  } else {
    return word_of(codes.first, j);
  }
}

// The words of the tiles (s, j) of all s, where j is known only when running.
template <int BITS>
KVRT_INLINE void tile_words(u32 (&words)[TILES], const u8* codes, int j) {
  if (BITS == 3 && j == 3) {
#pragma unroll
    for (int s = 0; s < TILES; ++s) {
      Codes<BITS> all;
      all.load(codes, s);
      words[s] = tile_word(all, 3);
    }
    return;
  }
#pragma unroll
  for (int s = 0; s < TILES; ++s) words[s] = Codes<BITS>::word(codes, s, j);
  if (BITS == 3)
#pragma unroll
    for (int s = 0; s < TILES; ++s) words[s] = bytes_of_fields(words[s]);
}

// The columns 2 c + 1 and 2 c + 8 of an operand B change places.
KVRT_INLINE void swap_columns(u32& low, u32& high) {
  const u32 first = ptx::prmt(low, high, 0x5410);
  high = ptx::prmt(low, high, 0x7632);
  low = first;
}

// The levels of codes of BITS (2, 3, 4) bits, looked up: see `FittedLevels`.
template <int BITS>
struct LookedUp {
  // Whether tiles are cheaper with swapped columns.
  static constexpr bool SWAPS = BITS == 3;
  const u8* table;
  u32 mine;  // what the lane has of a row

  KVRT_INLINE LookedUp(const Tables& tables, bool is_value) : table(tables.lookup()) {
    const u32 lane = threadIdx.x % WARP;
    mine = (BITS == 2 ? lane % 16 * 8 : lane * 4) + (is_value ? 128 : 0);
  }

  // The four registers of a tile s from its `tile_word`; where tiles are cheaper so, with swapped columns if wanted.
  KVRT_INLINE void tile(u32 (&a)[4], u32 word, int s, bool swapped) const {
    if constexpr (BITS == 4) {
      const Entries all(word);
      a[0] = level(all.even, 0);
      a[1] = level(all.odd, 2);
      a[2] = level(all.even, 1);
      a[3] = level(all.odd, 3);
    } else if constexpr (BITS == 3) {
      if (swapped) {
        const u32 bytes = word & 0x3F3F3F3Fu;
        a[0] = level(bytes, 0);
        a[2] = level(bytes, 1);
        a[1] = level(bytes, 2);
        a[3] = level(bytes, 3);
      } else {
        // Left shifts are products: in another pipe than prmt's.
        const u32 left = (word << 8 & 0x07000700u) | (word << 3 & 0x38003800u);
        const u32 right = (word << 5 & 0x07000700u) | (word & 0x38003800u);
        a[0] = level(left, 1);
        a[1] = level(left, 3);
        a[2] = level(right, 1);
        a[3] = level(right, 3);
      }
    } else {
      const u32 one = s & 1;
      const Entries all(word);
      const uint2 first = *reinterpret_cast<const uint2*>(entry(all.even, one));
      const uint2 second = *reinterpret_cast<const uint2*>(entry(all.odd, 2 + one));
      a[0] = first.x;
      a[1] = first.y;
      a[2] = second.x;
      a[3] = second.y;
    }
  }

 private:
  // Byte i of `bytes` is the row.
  KVRT_INLINE const u8* entry(u32 bytes, int i) const { return table + ptx::prmt(bytes, mine, 0x5504 | i << 4); }
  KVRT_INLINE u32 level(u32 bytes, int i) const { return *reinterpret_cast<const u32*>(entry(bytes, i)); }
};

// The same from registers: the levels' low bytes and their high bytes.
template <int BITS>
struct Permuted {
  static constexpr bool SWAPS = false;
  uint4 low, high;

  KVRT_INLINE Permuted(const Tables& tables, bool is_value) {
    const u8* bytes = tables.levels(is_value);
    low = *reinterpret_cast<const uint4*>(bytes);
    high = *reinterpret_cast<const uint4*>(bytes + 16);
  }

  // The four registers of a tile s from its `tile_word`.
  KVRT_INLINE void tile(u32 (&a)[4], u32 word, int s, bool) const {
    if constexpr (BITS == 4) {
      // Four nibbles of either half are the registers' codes; a byte's sign is a code's highest bit.
      const u32 nibbles = word & 0x77777777u, even = word << 4;
      find(a[0], a[1], ptx::prmt(nibbles, 0, 0x20), ptx::prmt(even, word, 0xEAC8));
      find(a[2], a[3], ptx::prmt(nibbles, 0, 0x31), ptx::prmt(even, word, 0xFBD9));
    } else if constexpr (BITS == 3) {
      // Two registers become the nibbles of a byte of either half.
      const u32 nibbles = (word & 0x07070707u) + (word & 0x38383838u) * 2;
      find(a[0], a[2], nibbles, 0);
      find(a[1], a[3], nibbles >> 16, 0);
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

#if LOOKUP
template <int BITS>
using Levels = LookedUp<BITS>;
#else
template <int BITS>
using Levels = Permuted<BITS>;
#endif

// Levels of a tile become numbers: halves and centres of the columns 0 ... 7 and 8 ... 15.
KVRT_INLINE void make_numbers(u32 (&a)[4], u32 half, u32 high_half, u32 centre, u32 high_centre) {
#pragma unroll
  for (int r = 0; r < 4; ++r) a[r] = ptx::fma_half2(a[r], r < 2 ? half : high_half, r < 2 ? centre : high_centre);
}
