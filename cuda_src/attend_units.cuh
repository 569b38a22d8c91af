// What decode attention reads: the units of a head, where their bytes are, and the ring that a warp fetches them into.
//
// A unit is one packed page of 64 tokens, or 16 exact tokens of a dense page, the tail or the sinks.
#pragma once
#include "attend_tables.cuh"

static constexpr int EXACT_TOKENS = 16;
static constexpr int PAGE_TOKENS = 64;
static constexpr int ROW_BYTES = HEAD_DIM * 2 + 16;  // 16 bytes of padding keep ldmatrix free of bank conflicts
static constexpr int EXACT_SIDE_BYTES = EXACT_TOKENS * ROW_BYTES;
static constexpr bool DENSE = K_CODEC == 0;
// A unit is fetched in one piece, or in two: its keys, then its values.
static constexpr int PIECES = BY_SIDE ? 2 : 1;
static constexpr int EXACT_BYTES = 2 / PIECES * EXACT_SIDE_BYTES;
static constexpr int VALUES_AT = BY_SIDE ? V_CODES_OFFSET : 0;  // where a page's last piece begins in its run
static constexpr int LAST_BYTES = RUN_BYTES - VALUES_AT + V_SHARED_BYTES;
static constexpr int PACKED_BYTES = DENSE ? 0 : LAST_BYTES > VALUES_AT ? LAST_BYTES : VALUES_AT;
static constexpr int UNIT_BYTES = PACKED_BYTES > EXACT_BYTES ? PACKED_BYTES : EXACT_BYTES;
static constexpr bool BY_BLOCK = FORM != VIEW_POST;  // the query is another for each block of 64 tokens
static constexpr int ANGLE_BYTES = BY_BLOCK || K_BIAS ? HEAD_DIM * 4 : 0;  // those of the block, behind a unit's bytes
static constexpr int STAGE_BYTES = UNIT_BYTES + ANGLE_BYTES;

// What units are found with. It is read at once, before anything is waited for.
struct Places {
  i64 extent[6];  // `Extent.numbers` of kvrt/backends/view.py
  i64 sink_rows, tail_rows, layer_offset, shared_offset = 0;

  KVRT_INLINE Places(const i64* layer, const i64* lengths) {
#pragma unroll
    for (int i = 0; i < 6; ++i) extent[i] = ptx::load_early(lengths + i);
    sink_rows = ptx::load_early(layer + VIEW_SINK_ROWS);
    tail_rows = ptx::load_early(layer + VIEW_TAIL_ROWS);
    layer_offset = ptx::load_early(layer + VIEW_LAYER_OFFSET);
    if (V_SHARED_BYTES > 0)
      shared_offset = ptx::load_early(layer + VIEW_SHARED_OFFSET) +
                      ptx::load_early(layer + VIEW_VALUE_SIDE + VIEW_SHARED);
  }
};

// About as many exact units take as long as a packed page.
static constexpr int EXACT_A_PAGE = VALUE_OUTLIERS ? 5 : 2;

// The units of one head, in order: pages, tail, sinks. `first` is the first position that may be seen; pages before it
// do not count.
//
// Of `warps` warps, warp i takes the pages i, i + warps, ... Those that have one page less than others take the exact
// units, if none gets more of them than fit into the time of a page; else these go on where pages end.
struct Work {
  const i64* table;  // addresses of pages
  const u8* angles;  // of where blocks of 64 tokens begin, ANGLE_BYTES each
  int sinks, pages, tail_tokens, tail_slot, sink_rows, tail_rows, first;
  int position, block;  // of the first page: that of its first token, and that in the table of angles
  int page_units, tail_units, units;
  int warps, exact_warps;  // among which pages, and exact units, are shared out
  i64 run, common;  // where the head's bytes, and those of all heads, are in a page

  KVRT_INLINE Work(const Places& places, int head, int window, int warps) : warps(warps) {
    sinks = int(places.extent[0]);
    pages = int(places.extent[1]);
    tail_tokens = int(places.extent[2]);
    tail_slot = int(places.extent[3]);
    table = reinterpret_cast<const i64*>(places.extent[4]);
    angles = reinterpret_cast<const u8*>(places.extent[5]);
    sink_rows = int(places.sink_rows);
    tail_rows = int(places.tail_rows);
    run = places.layer_offset + i64(head) * RUN_BYTES;
    common = places.layer_offset + places.shared_offset;
    const int tokens = sinks + pages * PAGE_TOKENS + tail_tokens;
    first = window > 0 && tokens > window ? tokens - window : 0;
    const int skipped = first > sink_rows ? min((first - sink_rows) / PAGE_TOKENS, pages) : 0;
    table += skipped;
    pages -= skipped;
    position = sink_rows + skipped * PAGE_TOKENS;
    block = (sinks + PAGE_TOKENS - 1) / PAGE_TOKENS + skipped;
    page_units = pages * (DENSE ? PAGE_TOKENS / EXACT_TOKENS : 1);
    tail_units = (tail_tokens + EXACT_TOKENS - 1) / EXACT_TOKENS;
    units = page_units + tail_units + (sinks + EXACT_TOKENS - 1) / EXACT_TOKENS;
    const int idle = warps - page_units % warps;
    exact_warps = DENSE || units - page_units > idle * EXACT_A_PAGE ? warps : idle;
  }
  // The unit that a warp takes after another.
  KVRT_INLINE int next(int index) const {
    if (!packed(index)) return index + exact_warps;
    const int after = index + warps;
    return packed(after) || after - page_units < exact_warps ? after : units;
  }
  // The address of a unit's page, 0 where it is in none.
  KVRT_INLINE i64 page(int index) const {
    return index < page_units ? __ldg(table + (DENSE ? index / (PAGE_TOKENS / EXACT_TOKENS) : index)) : 0;
  }
  // Whether a unit is a packed page. The first such are not seen from here on.
  KVRT_INLINE bool packed(int index) const { return !DENSE && index < page_units; }
  KVRT_INLINE int unseen(int index) const { return index == 0 && first > position ? first - position : 0; }
};

// One unit of exact tokens: where they are, and which of them count.
struct Unit {
  bool paged, sink;
  int block;       // of 64 tokens, as the table of angles counts them
  int row;         // of the first token in its array, or in the page
  int low, count;  // rows low ... count - 1 are seen

  KVRT_INLINE Unit(const Work& work, int index) {
    int position;
    paged = DENSE && index < work.page_units;
    sink = index >= work.page_units + work.tail_units;
    if (paged) {
      const int page = index * EXACT_TOKENS / PAGE_TOKENS;
      row = index * EXACT_TOKENS % PAGE_TOKENS;
      position = work.position + page * PAGE_TOKENS + row;
      count = EXACT_TOKENS;
      block = work.block + page;
    } else if (sink) {
      row = position = (index - work.page_units - work.tail_units) * EXACT_TOKENS;
      count = work.sinks - position;
      block = row / PAGE_TOKENS;
    } else {
      const int done = (index - work.page_units) * EXACT_TOKENS;
      // The ring is whole pages long and the tail starts on a page's boundary: a unit never wraps.
      row = work.tail_slot + done;
      if (row >= work.tail_rows) row -= work.tail_rows;
      position = work.position + work.pages * PAGE_TOKENS + done;
      count = work.tail_tokens - done;
      block = work.block + work.pages + done / PAGE_TOKENS;
    }
    count = count < EXACT_TOKENS ? count : EXACT_TOKENS;
    const int unseen = work.first - position;
    low = unseen < 0 ? 0 : unseen > count ? count : unseen;
  }
  KVRT_INLINE bool seen() const { return low < count; }
};

// Packed pages come by the copy engine, where there is one.
static constexpr bool BULK = KVRT_BULK_COPIES && !DENSE;

// A warp's ring of pieces of units. Its lanes call everything together.
struct Ring {
  u8* place;
  u64* barriers;  // of the stages
  // The stage whose turn it is, and the one that is free: that of the piece before.
  u8 *here, *free;
  u64 *barrier, *free_barrier;
  int turn = 0;
  u32 phase = 0;  // of the barriers: a warp's pages come before its exact tokens, a piece a stage

  KVRT_INLINE Ring(u8* place, u64* barriers) : place(place), barriers(barriers) {
    here = place;
    barrier = barriers;
    free = place + (STAGES - 1) * STAGE_BYTES;
    free_barrier = barriers + STAGES - 1;
#if KVRT_BULK_COPIES
    if (!DENSE && threadIdx.x % WARP == 0) {
#pragma unroll
      for (int i = 0; i < STAGES; ++i) ptx::barrier_init(barriers + i);
      ptx::barriers_are_made();
    }
    __syncwarp();
#endif
  }

  // Ask for a piece of a unit, into stage i or into the free one; `address` is that of its page.
  KVRT_INLINE void fetch(int i, const Work& work, int index, int piece, i64 address, const i64* layer,
                         int head) const {
    fetch_to(place + i * STAGE_BYTES, barriers + i, work, index, piece, address, layer, head);
  }
  KVRT_INLINE void fetch(const Work& work, int index, int piece, i64 address, const i64* layer, int head) const {
    fetch_to(free, free_barrier, work, index, piece, address, layer, head);
  }

  // Until all bytes of the stage are there whose turn it is, which was asked for STAGES - 1 calls ago.
  KVRT_INLINE void wait(bool packed) const {
#if KVRT_BULK_COPIES
    if (packed) {
      ptx::barrier_wait(barrier, phase);
      return;
    }
#endif
    // What is asked for after an exact unit comes in the same way.
    ptx::wait_copies<STAGES - 1>();
    __syncwarp();
  }

  // Its bytes are used: others may come. On to the next stage.
  KVRT_INLINE void release() {
#if KVRT_BULK_COPIES
    if (VALUES_IN_PLACE_OF_KEYS) ptx::order_copies();  // they were written by the lanes
#endif
    __syncwarp();
    u8* next = free;
    u64* next_barrier = free_barrier;
    if (STAGES != 2) {
      const bool last = turn == STAGES - 1;
      next = last ? place : here + STAGE_BYTES;
      next_barrier = last ? barriers : barrier + 1;
    }
    free = here;
    free_barrier = barrier;
    here = next;
    barrier = next_barrier;
    if (++turn == STAGES) {
      turn = 0;
      phase ^= 1;
    }
  }

 private:
  KVRT_INLINE void fetch_to(u8* to, u64* arrival, const Work& work, int index, int piece, i64 address,
                            const i64* layer, int head) const {
    if (work.packed(index)) {
      fetch_packed(to, arrival, work, piece, reinterpret_cast<const u8*>(address), work.block + index);
    } else if (index < work.units) {
      const Unit unit(work, index);
      if (unit.seen()) fetch_exact(to, work, unit, piece, reinterpret_cast<const u8*>(address), layer, head);
    }
    if (!BULK || !work.packed(index)) ptx::commit_copies();
  }

  KVRT_INLINE void copy(u8* to, const u8* from, int bytes) const {
    const int lane = threadIdx.x % WARP;
#pragma unroll 4
    for (int n = lane; n < bytes / 16; n += WARP) ptx::copy_async16(to + n * 16, from + n * 16);
  }

  KVRT_INLINE void fetch_packed(u8* to, u64* arrival, const Work& work, int piece, const u8* page, int block) const {
    const bool keys = piece == 0, values = piece == PIECES - 1;
    const int start = keys ? 0 : VALUES_AT, bytes = (values ? RUN_BYTES : VALUES_AT) - start;
    const int angle_bytes = keys ? ANGLE_BYTES : 0, shared_bytes = values ? V_SHARED_BYTES : 0;
    const u8* angles = angle_bytes > 0 ? work.angles + i64(block) * ANGLE_BYTES : nullptr;
#if KVRT_BULK_COPIES
    if (threadIdx.x % WARP == 0) {
      ptx::barrier_expect(arrival, bytes + shared_bytes + angle_bytes);
      ptx::copy_bulk(to, page + work.run + start, bytes, arrival);
      if (shared_bytes > 0) ptx::copy_bulk(to + bytes, page + work.common, shared_bytes, arrival);
      if (angle_bytes > 0) ptx::copy_bulk(to + UNIT_BYTES, angles, angle_bytes, arrival);
    }
#else
    copy(to, page + work.run + start, bytes);
    copy(to + bytes, page + work.common, shared_bytes);
    copy(to + UNIT_BYTES, angles, angle_bytes);
#endif
  }

  // EXACT_TOKENS rows, of which `count` are wanted: the others become zeros.
  KVRT_INLINE void copy_rows(u8* to, const u8* from, int count) const {
    constexpr int CHUNKS = HEAD_DIM / 8, ALL = EXACT_TOKENS * CHUNKS;
    const int lane = threadIdx.x % WARP;
    if (WARP % CHUNKS == 0 && count == EXACT_TOKENS) {
      // A lane's rows are always as far from each other.
      constexpr int STEP = WARP % CHUNKS == 0 ? WARP / CHUNKS : 1;
      u8* place = to + lane / CHUNKS * ROW_BYTES + lane % CHUNKS * 16;
      const u8* source = ptx::as_base(from + lane * 16);
#pragma unroll
      for (int i = 0; i < EXACT_TOKENS / STEP; ++i)
        ptx::copy_async16(place + i * STEP * ROW_BYTES, source + i * WARP * 16);
      return;
    }
    for (int n = lane; n < ALL; n += WARP) {
      const int token = n / CHUNKS, chunk = n % CHUNKS;
      // What is behind the last token is never read: memory nobody wrote may hold a NaN.
      const bool wanted = token < count;
      ptx::copy_async16(to + token * ROW_BYTES + chunk * 16, from + (wanted ? n * 16 : 0), wanted ? 16 : 0);
    }
  }

  KVRT_INLINE void fetch_exact(u8* to, const Work& work, const Unit& unit, int piece, const u8* page,
                               const i64* layer, int head) const {
    if (!unit.paged) ptx::wait_for_previous();  // the newest token is from the kernel before
    if (piece == 0) copy(to + UNIT_BYTES, work.angles + i64(unit.block) * ANGLE_BYTES, ANGLE_BYTES);
    const i64 first = unit.paged ? unit.row : head * i64(unit.sink ? work.sink_rows : work.tail_rows) + unit.row;
#pragma unroll 1  // the kernel is large for what a multiprocessor keeps of its code
    for (int side = piece; side < piece + 2 / PIECES; ++side) {
      const int array = (unit.sink ? VIEW_SINK_KEYS : VIEW_TAIL_KEYS) + side;
      const u8* rows = unit.paged ? page + work.run + (side ? V_CODES_OFFSET : K_CODES_OFFSET)
                                  : reinterpret_cast<const u8*>(layer[array]);
      copy_rows(to + (side - piece) * EXACT_SIDE_BYTES, rows + first * (HEAD_DIM * 2), unit.count);
    }
  }
};
