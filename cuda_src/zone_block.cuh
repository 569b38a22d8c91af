// Where everything is in a block of zones: twin of kvrt/trizone/layout.py, whose text says what it is.
#pragma once
#include "common.cuh"

static constexpr int BLOCK_TOKENS = 64;

// How many tokens or channels have 16, 8, 4 and 2 bits. They come in this order.
struct Counts {
  i64 packed;

  KVRT_INLINE explicit Counts(i64 packed) : packed(packed) {}
  // Those of width 16 >> i.
  KVRT_INLINE int of(int i) const { return int(packed >> 16 * i) & 0xFFFF; }
  KVRT_INLINE int coded() const { return of(1) + of(2) + of(3); }
  KVRT_INLINE int total() const { return of(0) + coded(); }
  // Bytes of rows of `length` numbers, one each.
  KVRT_INLINE int bytes(int length) const { return (16 * of(0) + 8 * of(1) + 4 * of(2) + 2 * of(3)) * length / 8; }
  // The width of number j of them.
  KVRT_INLINE int bits(int j) const { return j < of(0) ? 16 : j < of(0) + of(1) ? 8 : j < total() - of(3) ? 4 : 2; }
  // Bytes before row j, where rows have `length` numbers.
  KVRT_INLINE int offset(int j, int length) const {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int here = j < of(i) ? j : of(i);
      sum += here * (16 >> i);
      j -= here;
    }
    return sum * length / 8;
  }
};

// A row of the directory. What follows from it is computed where it is wanted: it would take many registers.
struct ZoneBlock {
  u8* run;
  const u8* channels;     // (kept channels,)
  Counts tokens, widths;  // widths: of channels

  KVRT_INLINE ZoneBlock(i64 run, i64 channels, i64 token_counts, i64 channel_counts)
      : run(reinterpret_cast<u8*>(run)),
        channels(reinterpret_cast<const u8*>(channels)),
        tokens(token_counts),
        widths(channel_counts) {}
  KVRT_INLINE explicit ZoneBlock(const i64* unit) : ZoneBlock(unit[0], unit[1], unit[2], unit[3]) {}

  // Tokens that a channel has room for.
  KVRT_INLINE int rows() const { return (tokens.total() + 3) / 4 * 4; }
  // Offsets in the run, where V rows are at 0, and its size.
  KVRT_INLINE int value_meta(int dim) const { return tokens.bytes(dim); }
  KVRT_INLINE int key_meta(int dim) const { return value_meta(dim) + 4 * tokens.coded(); }
  KVRT_INLINE int key_codes(int dim) const { return key_meta(dim) + 4 * widths.coded(); }
  KVRT_INLINE int bytes(int dim) const { return (key_codes(dim) + widths.bytes(rows()) + 15) / 16 * 16; }
};
