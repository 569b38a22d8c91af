// Sizes of attention over residual vector quantised pages, and which tokens a CTA takes.
//
// Of either side, 2^BITS entries a stage ("book"); all sums are of entries of the whole head.
#pragma once
#include "attend_merge.cuh"

static constexpr int PAGE_TOKENS = 64;
static constexpr int HEADS = 4;  // query heads of a CTA: a tile of a group
static constexpr int WARPS = 16, THREADS = WARPS * WARP;
#ifndef WARP_PAGES
#define WARP_PAGES 8  // that a warp has the scores of in registers
#endif
static constexpr int CHUNK = WARPS * WARP_PAGES;  // pages of a CTA at a time
static constexpr int RUNS = CHUNK + WARPS;        // and those that are read ahead

static constexpr int K_ENTRIES = 1 << K_BITS, V_ENTRIES = 1 << V_BITS;

// Books of keys are taken in blocks of four quads of books, then of two and of one, so that 16 lanes that read at once
// read different books; those that make up no quad are a block of their own.
static constexpr int QUADS = K_STAGES / 4, RAGGED = K_STAGES % 4;
static constexpr int FOURS = QUADS / 4, TWOS = QUADS / 2 % 2, ONES = QUADS % 2;  // blocks of so many quads
static constexpr int BLOCKS = FOURS + TWOS + ONES + (RAGGED > 0);
static constexpr int SLOTS = 16, ROW_BYTES = SLOTS * HEADS * 2;  // of an entry in a table: 128 bytes, all banks
static constexpr int TABLE_BYTES = K_ENTRIES * ROW_BYTES;        // of a block

// A histogram has a word for each entry, book and head: 32 of them, all banks, for each entry and TURNS.
static constexpr int V_BOOKS = V_STAGES > 8 && V_BITS < 10 ? 16 : 8;  // of a histogram
static constexpr int AT_ONCE = WARP / V_BOOKS, TURNS = HEADS / AT_ONCE;  // heads that a warp adds at once; how often
static constexpr int HISTOGRAMS = (V_STAGES + V_BOOKS - 1) / V_BOOKS;
static constexpr int HISTOGRAM_BYTES = V_ENTRIES * TURNS * WARP * 4;

// Of all the weight there is, in a histogram that is written down as halves.
static constexpr float WRITTEN = 16384;

// What one split of a tile of heads hands over: of sealed pages (top, total) for each head, of exact tokens (peak,
// total), and their weighted values (HEADS, HEAD_DIM).
static constexpr int STATE_FLOATS = 4 * HEADS + HEADS * HEAD_DIM;

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "lanes take channels in pairs, warps all of a row's");
static_assert(RUN_BYTES % 16 == 0 && K_CODES_OFFSET % 16 == 0 && V_CODES_OFFSET % 16 == 0, "loads are of 16 bytes");

// Tokens of a layer, as they are now: all is read before anything is waited for.
struct Tokens {
  const i64* table;  // addresses of pages that may be seen
  int sinks, pages, tail, tail_slot, sink_rows, tail_rows;
  int total, first;  // all tokens; the first position that may be seen
  int unseen;        // of the first page that may be seen, so many tokens may not

  KVRT_INLINE Tokens(const i64* layer, const i64* lengths, int window) {
    i64 extent[5];
#pragma unroll
    for (int i = 0; i < 5; ++i) extent[i] = ptx::load_early(lengths + i);
    sink_rows = int(ptx::load_early(layer + VIEW_SINK_ROWS));
    tail_rows = int(ptx::load_early(layer + VIEW_TAIL_ROWS));
    sinks = int(extent[0]);
    pages = int(extent[1]);
    tail = int(extent[2]);
    tail_slot = int(extent[3]);
    table = reinterpret_cast<const i64*>(extent[4]);
    total = sinks + pages * PAGE_TOKENS + tail;
    first = window > 0 && total > window ? total - window : 0;
    const int over = max(first - sink_rows, 0), skipped = min(over / PAGE_TOKENS, pages);
    table += skipped;
    pages -= skipped;
    unseen = over - skipped * PAGE_TOKENS;
  }
  // Pages, and exact tokens, are dealt out to splits one by one: so many get any.
  KVRT_INLINE int with_pages(int splits) const { return min(pages, splits); }
  KVRT_INLINE int with_exact(int splits) const { return min(sinks + tail, splits); }
};

// 2^x of a whole number from -126 to 127.
KVRT_INLINE float power_of_two(int x) { return __uint_as_float(u32(x + 127) << 23); }
// x < 2^exponent_above(x), of x >= 2^-126.
KVRT_INLINE int exponent_above(float x) { return int(__float_as_uint(x) >> 23 & 0xFF) - 126; }
