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

// One word of a plane: f(t, c, bit) for each code in it. `size` is the bits of a half of the word, `first` the first
// register that it has (8 bits: two registers of one tile; else four of each tile s, s + 1, ...).
template <class F>
KVRT_INLINE void each_code(int dim, int bits, int is_value, int s, int first, int size, int lane, int j, F f) {
  const int tiles = dim / 16;
  for (int field = 0; field < size / bits; ++field) {
    const int tile = bits == 8 ? s : s + field / 4, r = bits == 8 ? first + field : field % 4;
    for (int half = 0; half < 2; ++half) {
      const int depth = lane % 4 * 2 + half, bit = bits * field + size * half;
      if (is_value)
        f(16 * j + 8 * (r >> 1) + depth, 16 * tile + 8 * (r & 1) + lane / 4, bit);
      else
        f(16 * j + 8 * (r & 1) + lane / 4, 8 * ((r >> 1) * tiles + tile) + depth, bit);
    }
  }
}

// f(place, bytes, s, first, size, lane, j) for all words of a plane of 1, 2, 4 or 8 bits: `bytes` of them at `place`.
template <class F>
KVRT_INLINE void each_word(u8* address, int dim, int bits, F f) {
  const int tiles = dim / 16, whole = tiles * bits / 4;
  for (int i = threadIdx.x; i < whole * 128; i += THREADS) {
    const int unit = i / 128, s = bits == 8 ? unit / 2 : unit * 4 / bits;
    f(address + 4 * i, 4, s, bits == 8 ? unit % 2 * 2 : 0, 16, i / 4 % WARP, i % 4);
  }
  address += whole * 512;
  // Where few tiles are left, words are narrower.
  for (int s = whole * 4 / bits, size; s < tiles; s += size / (4 * bits)) {
    for (size = 16; size > 4 * bits * (tiles - s);) size /= 2;
    for (int i = threadIdx.x; i < 128; i += THREADS) f(address + i * size / 4, size / 4, s, 0, size, i / 4, i % 4);
    address += WARP * size;
  }
}

// Write bits plane ... plane + bits - 1 of a tile's codes.
KVRT_INLINE void pack_plane(const Tile& tile, int bits, int is_value, int plane, u8* address) {
  const u32 mask = (1u << bits) - 1;
  each_word(address, tile.dim, bits, [&](u8* place, int bytes, int s, int first, int size, int lane, int j) {
    u32 word = 0;
    each_code(tile.dim, bits, is_value, s, first, size, lane, j,
              [&](int t, int c, int bit) { word |= (tile.code(t, c) >> plane & mask) << bit; });
    if (bytes == 4)
      *reinterpret_cast<u32*>(place) = word;
    else
      for (int byte = 0; byte < bytes; ++byte) place[byte] = u8(word >> 8 * byte);
  });
}

// Write a tile's codes of 2, 3, 4 or 8 bits: dim * 64 * bits / 8 bytes. All threads must have set theirs.
KVRT_INLINE void pack_codes(const Tile& tile, int bits, int is_value, u8* address) {
  pack_plane(tile, bits == 3 ? 2 : bits, is_value, 0, address);
  if (bits == 3) pack_plane(tile, 1, is_value, 2, address + PAGE_TOKENS * tile.dim / 4);
}

KVRT_INLINE void unpack_plane(u8* address, int bits, int is_value, int plane, const Tile& tile) {
  const u32 mask = (1u << bits) - 1;
  each_word(address, tile.dim, bits, [&](u8* place, int bytes, int s, int first, int size, int lane, int j) {
    u32 word = 0;
    if (bytes == 4)
      word = *reinterpret_cast<const u32*>(place);
    else
      for (int byte = 0; byte < bytes; ++byte) word |= u32(place[byte]) << 8 * byte;
    each_code(tile.dim, bits, is_value, s, first, size, lane, j, [&](int t, int c, int bit) {
      const u32 field = (word >> bit & mask) << plane;
      tile.set_code(t, c, plane ? tile.code(t, c) | field : field);
    });
  });
  __syncthreads();
}

// Read codes of 2, 3, 4 or 8 bits into a tile, for all threads to see.
KVRT_INLINE void unpack_codes(u8* address, int bits, int is_value, const Tile& tile) {
  unpack_plane(address, bits == 3 ? 2 : bits, is_value, 0, tile);
  if (bits == 3) unpack_plane(address + PAGE_TOKENS * tile.dim / 4, 1, is_value, 2, tile);
}
