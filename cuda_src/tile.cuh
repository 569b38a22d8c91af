// One head's tokens of a page: where they come from, and a tile of them in shared memory.
#pragma once
#include "exact.cuh"

// 64 tokens x dim numbers in shared memory, each of which its code replaces in time.
// Rows are a number longer than dim, so that neither a row nor a column lies in one bank.
struct Tile {
  float* numbers;
  int dim;

  KVRT_INLINE float& at(int t, int c) const { return numbers[t * (dim + 1) + c]; }
  KVRT_INLINE u32 code(int t, int c) const { return __float_as_uint(at(t, c)); }
  KVRT_INLINE void set_code(int t, int c, u32 code) const { at(t, c) = __uint_as_float(code); }
};

// f(t, c) for all numbers of a tile, by all threads of the block.
template <class F>
KVRT_INLINE void each_number(int dim, F f) {
  for (int t = threadIdx.x / WARP; t < PAGE_TOKENS; t += THREADS / WARP)
    for (int c = threadIdx.x % WARP; c < dim; c += WARP) f(t, c);
}

// One side of the tokens of a page, as the tail holds them: older ones in the ring, where position tail_first has
// slot tail_slot, those from position new_start on in fresh (new_tokens, heads, dim) f32. These are rounded as the
// tail would have, so that bytes do not depend on how calls were split.
struct Source {
  const u8* tail;
  const float* fresh;
  int heads, dim, rows, kind, position, tail_first, tail_slot, new_start;

  KVRT_INLINE Source(const i64* layer, int is_value, int page, int tail_first, int tail_slot, const float* fresh,
                     int new_start)
      : tail(reinterpret_cast<const u8*>(layer[is_value ? VIEW_TAIL_VALUES : VIEW_TAIL_KEYS])),
        fresh(fresh),
        heads(int(layer[VIEW_HEADS])),
        dim(int(layer[VIEW_DIM])),
        rows(int(layer[VIEW_TAIL_ROWS])),
        kind(int(layer[is_value ? VIEW_VALUE_KIND : VIEW_KEY_KIND])),
        position(int(layer[VIEW_SINK_ROWS]) + page * PAGE_TOKENS),
        tail_first(tail_first),
        tail_slot(tail_slot),
        new_start(new_start) {}

  KVRT_INLINE float at(int head, int t, int c) const {
    const int place = position + t;
    if (place >= new_start) return rounded(fresh[(i64(place - new_start) * heads + head) * dim + c], kind);
    const i64 row = i64(head) * rows + (tail_slot + place - tail_first) % rows;
    return load_number(tail + row * dim * kind_bytes(kind), kind, c);
  }
};
