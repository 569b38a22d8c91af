// The scores that a warp has of its pages, and what they become: maxima and sums, then weights.
#pragma once
#include "rvq_histogram.cuh"

// A table's way into shared memory: all of it by the copy engine, or by all threads.
struct TableCopy {
  u64* barrier;

  KVRT_INLINE explicit TableCopy(u64* barrier) : barrier(barrier) {
#if KVRT_BULK_COPIES
    if (threadIdx.x == 0) {
      ptx::barrier_init(barrier);
      ptx::barriers_are_made();
    }
#endif
  }
  // Once nobody reads what is there.
  KVRT_INLINE void begin(u8* to, const u8* table) const {
#if KVRT_BULK_COPIES
    ptx::order_copies();
    __syncthreads();
    if (threadIdx.x == 0) {
      constexpr int PART = TABLE_BYTES / 4;
      ptx::barrier_expect(barrier, TABLE_BYTES);
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::copy_bulk(to + i * PART, table + i * PART, PART, barrier);
    }
#else
    __syncthreads();
    for (int i = threadIdx.x; i < TABLE_BYTES / 16; i += THREADS) ptx::copy_async16(to + i * 16, table + i * 16);
    ptx::commit_copies();
#endif
  }
  // For the copy of that number.
  KVRT_INLINE void wait(int number) const {
#if KVRT_BULK_COPIES
    ptx::barrier_wait(barrier, number & 1);
#else
    ptx::wait_copies<0>();
    __syncthreads();
#endif
  }
};

// What a CTA's pages are found with, in shared memory: all threads would need registers for it.
struct Task {
  const i64* table;  // of pages, of which the CTA has each `splits`-th
  i64 run;           // where the head's bytes are in a page
  int tile, split, splits;
  int pages, begin;  // all, and the first of those that are taken now
  int unseen;        // tokens of the first page

  // runs (RUNS,) = where the head's bytes are of the pages begin, begin + 1, ...; behind the last, those of the first:
  // what is read ahead is always there. By all threads.
  KVRT_INLINE void find_runs(i64* runs) const {
    const int at = begin + int(threadIdx.x);
    if (threadIdx.x < RUNS && pages > 0) runs[threadIdx.x] = __ldg(table + i64(at < pages ? at : 0) * splits) + run;
  }
  KVRT_INLINE void next(int count) {
    __syncthreads();
    if (threadIdx.x == 0) begin += count;
    __syncthreads();
  }
};

// A warp's pages of a chunk: `count`, whose runs lie WARPS apart.
struct OwnPages {
  const i64* runs;
  int count;

  KVRT_INLINE const u8* run(int i) const {
    return reinterpret_cast<const u8*>(runs[i * WARPS + ptx::as_new(threadIdx.x) / WARP]);
  }

  // Codes of page i, if it is one, will be wanted: of keys, the block's from `first_book` on.
  template <int BOOKS>
  KVRT_INLINE void prefetch_keys(int i, int first_book) const {
    constexpr int LINE = 128, LOW = BOOKS * PAGE_TOKENS / LINE, ALL = LOW + BOOKS * K_FURTHER * 8 / LINE;
    const int lane = ptx::as_new(threadIdx.x) % WARP;
    if (i >= count || lane >= ALL) return;
    const int low = PAGE_TOKENS * first_book + lane * LINE;
    const int further = PAGE_TOKENS * K_STAGES + 8 * K_FURTHER * first_book + (lane - LOW) * LINE;
    ptx::prefetch(run(i) + K_CODES_OFFSET + (lane < LOW ? low : further));
  }
  KVRT_INLINE void prefetch_values(int i) const {
    constexpr int LINE = 128;
    const int lane = ptx::as_new(threadIdx.x) % WARP;
    if (i < count && lane * LINE < 8 * V_STAGES * V_BITS) ptx::prefetch(run(i) + V_CODES_OFFSET + lane * LINE);
  }
};

struct Scores {
  PageScores of[WARP_PAGES];

  KVRT_INLINE void clear() {
    each([](float& x, int) { x = 0; }, WARP_PAGES);
  }

  // Page i, where the compiler knows no number: branches, so that all stay in registers.
  KVRT_INLINE void add(int i, const PageScores& scores) {
    at<0, WARP_PAGES>(i, [&](PageScores& own) {
#pragma unroll
      for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int h = 0; h < HEADS; ++h) own[u][h] += scores[u][h];
    });
  }
  KVRT_INLINE void get(int i, PageScores& scores) {
    at<0, WARP_PAGES>(i, [&](PageScores& own) {
#pragma unroll
      for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int h = 0; h < HEADS; ++h) scores[u][h] = own[u][h];
    });
  }
  // Call with (score, head) for the first pages.
  template <class Function>
  KVRT_INLINE void each(Function function, int count) {
#pragma unroll
    for (int i = 0; i < WARP_PAGES; ++i) {
      if (i >= count) break;
#pragma unroll
      for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int h = 0; h < HEADS; ++h) function(of[i][u][h], h);
    }
  }
  // Of the first page, so many tokens are not seen.
  KVRT_INLINE void hide(int unseen) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
      for (int h = 0; h < HEADS; ++h)
        if (8 * (lane / 4) + 4 * u + lane % 4 < unseen) of[0][u][h] = NOTHING;
  }

  // Add the scores of M quads of books to those of all the warp's pages.
  template <int M, int WIDTH>
  KVRT_INLINE void look_up_all(const OwnPages& pages, int first_book, const u8* table, const TableCopy& copy,
                                int number) {
    KeyCodes<M, WIDTH> next;
    next.read(pages.run(0), first_book);
    u32 slots[M];
    find_slots(slots);
    const Selectors selectors;
    pages.prefetch_keys<4 * M>(1, first_book);
    pages.prefetch_keys<4 * M>(2, first_book);
    copy.wait(number);
#pragma unroll 1
    for (int i = 0; i < pages.count; ++i) {
      const KeyCodes<M, WIDTH> codes = next;
      pages.prefetch_keys<4 * M>(i + 3, first_book);
      next.read(pages.run(i + 1), first_book);
      PageScores scores = {};
      look_up(scores, codes, table, slots, selectors);
      add(i, scores);
    }
  }

 private:
  template <int FIRST, int COUNT, class Function>
  KVRT_INLINE void at(int i, Function function) {
    if constexpr (COUNT == 1) {
      function(of[FIRST]);
    } else if (i < FIRST + COUNT / 2) {
      at<FIRST, COUNT / 2>(i, function);
    } else {
      at<FIRST + COUNT / 2, COUNT - COUNT / 2>(i, function);
    }
  }
};

// Of each head, over a CTA: `scratch` (WARPS, HEADS) f32. MAXIMUM, or else a sum.
template <bool MAXIMUM>
KVRT_INLINE void over_warps(float (&x)[HEADS], float* scratch) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
  for (int h = 0; h < HEADS; ++h) x[h] = MAXIMUM ? warp_maximum(x[h]) : warp_sum(x[h]);
  if (lane == 0) *reinterpret_cast<float4*>(scratch + warp * HEADS) = {x[0], x[1], x[2], x[3]};
  __syncthreads();
  const auto join = [](float a, float b) { return MAXIMUM ? fmaxf(a, b) : a + b; };
#pragma unroll 4
  for (int w = 0; w < WARPS; ++w) {
    const float4 own = *reinterpret_cast<const float4*>(scratch + w * HEADS);
    x[0] = w ? join(x[0], own.x) : own.x;
    x[1] = w ? join(x[1], own.y) : own.y;
    x[2] = w ? join(x[2], own.z) : own.z;
    x[3] = w ? join(x[3], own.w) : own.w;
  }
}
