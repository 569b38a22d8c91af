// What a calibration fitted for non-uniform integers, from global memory into a CTA's tables.
//
// A side's table: levels (2^bits,), boundaries (2^bits,), of keys centre and half (heads, HEAD_DIM) f32 each. A thread
// reads all its part before the first pages are asked for, so that nothing waits for anything else, and writes it
// while they are on their way.
#pragma once
#include "attend_tables.cuh"

static constexpr int CTA_THREADS = WARPS * WARP;

// Levels of keys are so many times what they are, halves of a channel that much less: then a query (up to 256) times a
// half of up to MOST_HALF is finite. Channels with more are cut, where keys do not become numbers.
static constexpr float LEVEL_UNIT = 16.0f, MOST_HALF = 4080.0f;

// Levels of one side.
template <int BITS>
struct FittedLevels {
  static constexpr int CODES = 1 << BITS, ROWS = lookup_rows(BITS), PIECES = LOOKUP_ROW / 2 / 16;
  // Threads that share a row of the table that levels are looked up in, the pieces of each, and rows of a thread.
  static constexpr int FREE = CTA_THREADS / ROWS, SHARERS = FREE >= 8 ? 8 : FREE >= 4 ? 4 : FREE >= 2 ? 2 : 1;
  static constexpr int MINE = PIECES / SHARERS, EACH = (ROWS * SHARERS + CTA_THREADS - 1) / CTA_THREADS;
  float own, rows[EACH][4];

  KVRT_INLINE explicit FittedLevels(const float* levels) {
    if (!LOOKUP) own = __ldg(levels + threadIdx.x % CODES);
    if (LOOKUP)
#pragma unroll
      for (int n = 0; n < EACH; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int from = (BITS == 3 ? 3 : 4) * (i % 2) + 2 * (i / 2);
          rows[n][i] = BITS == 2 || i < 2 ? __ldg(levels + (row(n) >> from) % CODES) : rows[n][i - 2];
        }
  }

  // To 16 low bytes and 16 high bytes.
  KVRT_INLINE void write_bytes(u8* to, float unit) const {
    if (threadIdx.x >= CODES) return;
    const u16 level = ptx::float_to_half(own * unit);
    to[threadIdx.x] = level & 255;
    to[16 + threadIdx.x] = level >> 8;
  }

  // To half a row of the table that levels are looked up in, for each byte: the levels of the code in its low nibble
  // (three bits: its low bits) and of that above, 32 times. Of two bits a nibble has two codes: the levels of the first
  // ones, then of the second ones, 16 times. So each lane has its own banks, and no two lanes wait for each other.
  KVRT_INLINE void write_rows(u8* to, float unit) const {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const float(&x)[4] = rows[n];
      const u32 first = ptx::pack_half(x[0] * unit, x[1] * unit), second = ptx::pack_half(x[2] * unit, x[3] * unit);
      u8* pieces = to + row(n) * LOOKUP_ROW + threadIdx.x % SHARERS * MINE * 16;
      if (row(n) < ROWS)
#pragma unroll
        for (int i = 0; i < MINE; ++i)  // the lanes of a warp begin in different banks
          *reinterpret_cast<uint4*>(pieces + (row(n) + i) % MINE * 16) = {first, second, first, second};
    }
  }

 private:
  static KVRT_INLINE int row(int n) { return (threadIdx.x + n * CTA_THREADS) / SHARERS; }
};

// Centre and half of a KV head's channels; half is `apart` numbers behind centre. The last warps make them: the first
// ones have other tables.
struct FittedColumns {
  static constexpr int COUNT = 4 * TILES, EACH = (COUNT + CTA_THREADS - 1) / CTA_THREADS;
  float2 parts[EACH][4];

  KVRT_INLINE FittedColumns(const float* centre, i64 apart) {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = place(n), c = 8 * (i / 4) + 2 * (i % 4);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (i < COUNT)
          parts[n][k] = __ldg(reinterpret_cast<const float2*>(centre + (k < 2 ? apart : 0) + k % 2 * HALF + c));
    }
  }

  KVRT_INLINE void write(u32* to) const {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = place(n);
      if (i >= COUNT) break;
      u32 packed[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float unit = k < 2 ? 1 / LEVEL_UNIT : 1.0f, most = k < 2 && !KEYS_ARE_NUMBERS ? MOST_HALF : 65504.0f;
        packed[k] = ptx::pack_half(min(parts[n][k].x, most) * unit, min(parts[n][k].y, most) * unit);
      }
      reinterpret_cast<uint4*>(to)[i] = {packed[0], packed[1], packed[2], packed[3]};
    }
  }

 private:
  static KVRT_INLINE int place(int n) { return CTA_THREADS - 1 - int(threadIdx.x) + n * CTA_THREADS; }
};

struct NothingFitted {
  KVRT_INLINE NothingFitted(const Sources&, int) {}
  KVRT_INLINE void write(const Tables&) const {}
};

#if K_CODEC == 4
struct FittedKeys {
  FittedLevels<K_BITS> levels;
  FittedColumns columns;

  KVRT_INLINE FittedKeys(const Sources& sources, int head)
      : levels(sources.keys),
        columns(sources.keys + 2 * (1 << K_BITS) + head * HEAD_DIM, sources.heads * HEAD_DIM) {}

  KVRT_INLINE void write(const Tables& tables) const {
    if (LOOKUP)
      levels.write_rows(tables.lookup(), LEVEL_UNIT);
    else
      levels.write_bytes(tables.levels(false), LEVEL_UNIT);
    columns.write(tables.columns());
  }
};
#else
using FittedKeys = NothingFitted;
#endif

#if V_CODEC == 4
struct FittedValues {
  FittedLevels<V_BITS> levels;

  KVRT_INLINE FittedValues(const Sources& sources, int) : levels(sources.values) {}

  KVRT_INLINE void write(const Tables& tables) const {
    if (LOOKUP)
      levels.write_rows(tables.lookup() + LOOKUP_ROW / 2, 1);
    else
      levels.write_bytes(tables.levels(true), 1);
  }
};
#else
using FittedValues = NothingFitted;
#endif

struct Fitted {
  FittedKeys keys;
  FittedValues values;

  KVRT_INLINE Fitted(const Sources& sources, int head) : keys(sources, head), values(sources, head) {}
  KVRT_INLINE void write(const Tables& tables) const {
    keys.write(tables);
    values.write(tables);
  }
};
