// The order of codes in a page: that of tensor-core fragments. Twin of kvrt/kvstore/fragment.py, which explains it.
#pragma once
#include "tile.cuh"

// The column whose scale is at a place, and the place of a column.
KVRT_INLINE int column_at(int place, int cols, int is_value) {
  const int s = place >> 4, pair = place >> 2 & 3, half = place >> 1 & 1, one = place & 1;
  if (is_value) return 16 * s + 8 * half + 2 * pair + one;
  return half * (cols >> 1) + 8 * s + 2 * pair + one;
}
KVRT_INLINE int place_of(int column, int cols, int is_value) {
  int s = column >> 4, half = column >> 3 & 1;
  if (!is_value) {
    half = column >= cols >> 1;
    s = (column - half * (cols >> 1)) >> 3;
    column -= half * (cols >> 1);
  }
  return s << 4 | (column >> 1 & 3) << 2 | half << 1 | (column & 1);
}

// Where the code of half `one` of a register of tile (s, j) of a lane is: f(t, c).
template <class F>
KVRT_INLINE void at_code(int dim, int is_value, int s, int j, int lane, int reg, int one, F f) {
  const int depth = lane % 4 * 2 + one;
  if (is_value)
    f(16 * j + 8 * (reg >> 1) + depth, 16 * s + 8 * (reg & 1) + lane / 4);
  else
    f(16 * j + 8 * (reg & 1) + lane / 4, 8 * ((reg >> 1) * (dim / 16) + s) + depth);
}

// f(t, c, word, bit, first, count) for each part of the codes of 3 bits in a lane's words of tile s: `count` bits of a
// code, from `first` on, are at `bit` of a word.
template <class F>
KVRT_INLINE void each_three(int dim, int is_value, int s, int lane, F f) {
  for (int one = 0; one < 2; ++one)
    for (int reg = 0; reg < 4; ++reg) {
      for (int j = 0; j < 3; ++j)
        at_code(dim, is_value, s, j, lane, reg, one,
                [&](int t, int c) { f(t, c, j, 16 * one + 9 * (reg & 1) + 3 * (reg >> 1), 0, 3); });
      at_code(dim, is_value, s, 3, lane, reg, one, [&](int t, int c) {
        if (reg < 3) return f(t, c, reg, 16 * one + 6, 0, 3);
        for (int word = 0; word < 3; ++word) f(t, c, word, 16 * one + 15, word, 1);
      });
    }
}

// f(words, s, lane) for all words of codes of 3 bits: a lane's are words[0], words[WARP] and words[2 * WARP].
template <class F>
KVRT_INLINE void each_three_words(u8* address, int dim, F f) {
  for (int i = threadIdx.x; i < dim / 16 * WARP; i += THREADS)
    f(reinterpret_cast<u32*>(address) + i / WARP * 3 * WARP + i % WARP, i / WARP, i % WARP);
}

// f(t, c, bit) for each code of 2, 4 or 8 bits in a word of one j. `size` is the bits of a half of the word, `first`
// the first register that it has (8 bits: two registers of one tile; else four of each tile s, s + 1, ...).
template <class F>
KVRT_INLINE void each_code(int dim, int bits, int is_value, int s, int first, int size, int lane, int j, F f) {
  for (int field = 0; field < size / bits; ++field) {
    const int tile = bits == 8 ? s : s + field / 4, reg = bits == 8 ? first + field : field % 4;
    for (int one = 0; one < 2; ++one)
      at_code(dim, is_value, tile, j, lane, reg, one, [&](int t, int c) { f(t, c, bits * field + size * one); });
  }
}

// f(place, bytes, s, first, size, lane, j) for all words of codes of 2, 4 or 8 bits: `bytes` of them at `place`.
template <class F>
KVRT_INLINE void each_word(u8* address, int dim, int bits, F f) {
  const int tiles = dim / 16, whole = tiles * bits / 4;
  for (int i = threadIdx.x; i < whole * 128; i += THREADS) {
    const int unit = i / 128, s = bits == 8 ? unit / 2 : unit * 4 / bits;
    f(address + 4 * i, 4, s, bits == 8 ? unit % 2 * 2 : 0, 16, i / 4 % WARP, i % 4);
  }
  // Where one tile is left (2 bits), words are narrower.
  if (tiles * bits % 4 != 0)
    for (int i = threadIdx.x; i < 128; i += THREADS) f(address + whole * 512 + 2 * i, 2, tiles - 1, 0, 8, i / 4, i % 4);
}

// Write a tile's codes of 2, 3, 4 or 8 bits: dim * 64 * bits / 8 bytes. All threads must have set theirs.
KVRT_INLINE void pack_codes(const Tile& tile, int bits, int is_value, u8* address) {
  if (bits == 3) {
    each_three_words(address, tile.dim, [&](u32* words, int s, int lane) {
      u32 found[3] = {0, 0, 0};
      each_three(tile.dim, is_value, s, lane, [&](int t, int c, int word, int bit, int first, int count) {
        found[word] |= (tile.code(t, c) >> first & ((1u << count) - 1)) << bit;
      });
      for (int word = 0; word < 3; ++word) words[word * WARP] = found[word];
    });
    return;
  }
  each_word(address, tile.dim, bits, [&](u8* place, int bytes, int s, int first, int size, int lane, int j) {
    u32 word = 0;
    each_code(tile.dim, bits, is_value, s, first, size, lane, j,
              [&](int t, int c, int bit) { word |= tile.code(t, c) << bit; });
    if (bytes == 4)
      *reinterpret_cast<u32*>(place) = word;
    else
      *reinterpret_cast<u16*>(place) = u16(word);
  });
}

// Read codes of 2, 3, 4 or 8 bits into a tile, for all threads to see.
KVRT_INLINE void unpack_codes(u8* address, int bits, int is_value, const Tile& tile) {
  if (bits == 3)
    each_three_words(address, tile.dim, [&](const u32* words, int s, int lane) {
      each_three(tile.dim, is_value, s, lane, [&](int t, int c, int word, int bit, int first, int count) {
        const u32 field = (words[word * WARP] >> bit & ((1u << count) - 1)) << first;
        tile.set_code(t, c, first ? tile.code(t, c) | field : field);
      });
    });
  else
    each_word(address, tile.dim, bits, [&](u8* place, int bytes, int s, int first, int size, int lane, int j) {
      const u32 word = bytes == 4 ? *reinterpret_cast<const u32*>(place) : *reinterpret_cast<const u16*>(place);
      each_code(tile.dim, bits, is_value, s, first, size, lane, j,
                [&](int t, int c, int bit) { tile.set_code(t, c, word >> bit & ((1u << bits) - 1)); });
    });
  __syncthreads();
}
