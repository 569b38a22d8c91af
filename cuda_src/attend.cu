// Decode attention: one query token over sinks, sealed pages and tail of one layer, split among CTAs, and combined.
//
// A grid of (splits, KV heads * tiles of 8 query heads). The work of a head is a list of units: 16 exact tokens (sinks,
// tail, dense pages) or one packed page of 64. A warp takes every splits * WARPS-th of them, fetches the bytes of a
// unit with cp.async into a ring of its own in shared memory, and keeps a running softmax (Milakov and Gimelshein 2018)
// in registers. Keys, and values transposed, are the wide operand A of mma.m16n8k16, query heads are N, so each byte is
// read once for a whole group. The last CTA of a head to arrive combines the splits.
//
// Compiled with -D for one layout: HEAD_DIM, FORM, K_HADAMARD, V_HADAMARD (block or 0), K_NORM, RUN_BYTES and, of each
// side, K_CODEC, K_KIND (of exact tokens), K_CODES_OFFSET, K_META_OFFSET and the codec's own (K_BITS, K_GROUP, K_MODE,
// K_BY_ROWS; K_E4M3). WARPS, STAGES, CTAS_AN_SM may be set.
#ifndef WARPS
#define WARPS 4
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef CTAS_AN_SM
#define CTAS_AN_SM 3
#endif

#include "attend_softmax.cuh"

static constexpr int EXACT_TOKENS = 16;
static constexpr int PAGE_TOKENS = 64;
static constexpr int ROW_BYTES = HEAD_DIM * 2 + 16;  // 16 bytes of padding keep ldmatrix free of bank conflicts
static constexpr int EXACT_BYTES = 2 * EXACT_TOKENS * ROW_BYTES;
static constexpr bool DENSE = K_CODEC == 0;
static constexpr int STAGE_BYTES = !DENSE && RUN_BYTES > EXACT_BYTES ? RUN_BYTES : EXACT_BYTES;

static_assert((K_CODEC == 0) == (V_CODEC == 0), "keys and values are both dense or both packed");
static_assert((K_KIND == 2) == (V_KIND == 2), "a layer is bf16 on both sides or on none");

// Lengths and addresses of the moment; `Extent` of kvrt/backends/view.py.
struct Extent {
  i64 sinks, pages, tail_tokens, tail_slot, table, bases;
};

// The units of one head, in order: sinks, tail, pages. `first` is the first position that may be seen.
struct Work {
  Extent extent;
  int sink_units, tail_units, page_units, sink_blocks;
  i64 first, sink_rows, tail_rows;

  KVRT_INLINE Work(const i64* layer, const i64* lengths, int window) {
    extent = {lengths[0], lengths[1], lengths[2], lengths[3], lengths[4], lengths[5]};
    sink_rows = layer[VIEW_SINK_ROWS];
    tail_rows = layer[VIEW_TAIL_ROWS];
    const i64 tokens = extent.sinks + extent.pages * PAGE_TOKENS + extent.tail_tokens;
    first = window > 0 && tokens > window ? tokens - window : 0;
    sink_units = int(extent.sinks + EXACT_TOKENS - 1) / EXACT_TOKENS;
    tail_units = int(extent.tail_tokens + EXACT_TOKENS - 1) / EXACT_TOKENS;
    page_units = int(extent.pages) * (DENSE ? PAGE_TOKENS / EXACT_TOKENS : 1);
    sink_blocks = int(extent.sinks + PAGE_TOKENS - 1) / PAGE_TOKENS;
  }
  KVRT_INLINE int units() const { return sink_units + tail_units + page_units; }
};

// One unit: where its tokens are, and which of them count.
struct Unit {
  bool packed;
  int block;         // of 64 tokens, as the table of angles counts them
  i64 page;          // or -1
  i64 row;           // of the first token in its array, or in the page
  int low, count;    // rows low ... count - 1 are seen

  KVRT_INLINE Unit(const Work& work, int index) {
    packed = false;
    page = -1;
    i64 position;
    if (index < work.sink_units) {
      row = position = i64(index) * EXACT_TOKENS;
      count = int(work.extent.sinks - position);
      block = index * EXACT_TOKENS / PAGE_TOKENS;
    } else if (index < work.sink_units + work.tail_units) {
      const i64 done = i64(index - work.sink_units) * EXACT_TOKENS;
      // The ring is whole pages long and the tail starts on a page's boundary: a unit never wraps.
      row = (work.extent.tail_slot + done) % work.tail_rows;
      position = work.sink_rows + work.extent.pages * PAGE_TOKENS + done;
      count = int(work.extent.tail_tokens - done);
      block = work.sink_blocks + int(work.extent.pages + done / PAGE_TOKENS);
    } else {
      const int at = index - work.sink_units - work.tail_units;
      packed = !DENSE;
      page = DENSE ? at * EXACT_TOKENS / PAGE_TOKENS : at;
      row = DENSE ? at * EXACT_TOKENS % PAGE_TOKENS : 0;
      position = work.sink_rows + page * PAGE_TOKENS + row;
      count = PAGE_TOKENS;
      block = work.sink_blocks + int(page);
    }
    const int most = packed ? PAGE_TOKENS : EXACT_TOKENS;
    count = count < most ? count : most;
    const i64 unseen = work.first - position;
    low = unseen < 0 ? 0 : unseen > count ? count : int(unseen);
  }
  KVRT_INLINE bool seen() const { return low < count; }
};

// Ask for the bytes of a unit.
KVRT_INLINE void fetch(u8* stage, const Work& work, const Unit& unit, const i64* layer, int head) {
  const int lane = threadIdx.x % WARP;
  const u8* page = nullptr;
  if (unit.page >= 0)
    page = reinterpret_cast<const u8*>(reinterpret_cast<const i64*>(work.extent.table)[unit.page]) +
           layer[VIEW_LAYER_OFFSET] + i64(head) * RUN_BYTES;
  if (unit.packed) {
    for (int i = lane; i < RUN_BYTES / 16; i += WARP) ptx::copy_async16(stage + i * 16, page + i * 16);
    return;
  }
  const bool sink = unit.page < 0 && unit.block < work.sink_blocks;
  const i64 rows = sink ? work.sink_rows : work.tail_rows;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const u8* source;
    if (page != nullptr)
      source = page + (side ? V_CODES_OFFSET : K_CODES_OFFSET) + unit.row * HEAD_DIM * 2;
    else
      source = reinterpret_cast<const u8*>(layer[(sink ? VIEW_SINK_KEYS : VIEW_TAIL_KEYS) + side]) +
               (head * rows + unit.row) * HEAD_DIM * 2;
    constexpr int CHUNKS = HEAD_DIM / 8;
    for (int i = lane; i < EXACT_TOKENS * CHUNKS; i += WARP) {
      const int token = i / CHUNKS, chunk = i % CHUNKS;
      // What is behind the last token is never read: memory nobody wrote may hold a NaN.
      const bool wanted = token < unit.count;
      ptx::copy_async16(stage + (side * EXACT_TOKENS + token) * ROW_BYTES + chunk * 16,
                        source + (wanted ? i64(token) * HEAD_DIM * 2 + chunk * 16 : 0), wanted ? 16 : 0);
    }
  }
}

KVRT_INLINE void mma_exact(float* sums, const u32 (&a)[4], u32 low, u32 high) {
#if K_KIND == 2
  ptx::mma_bfloat(sums, a[0], a[1], a[2], a[3], low, high);
#else
  ptx::mma_half(sums, a[0], a[1], a[2], a[3], low, high);
#endif
}

// Scores of 16 exact keys.
KVRT_INLINE void exact_scores(float (&scores)[4], const u8* stage, const Query& query) {
  const int lane = threadIdx.x % WARP;
  // Matrices: tokens 0 ... 7 and 8 ... 15 of the low half's channels, then of the high half's.
  const u8* rows = stage + lane % 16 * ROW_BYTES + lane / 16 * HALF * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) scores[i] = 0;
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    u32 a[4];
    ptx::load_matrix4(a, rows + s * 16);
    mma_exact(scores, a, query.low[s], query.high[s]);
#if K_KIND == 2
    mma_exact(scores, a, query.low_rest[s], query.high_rest[s]);
#endif
  }
}

// sums += weights * 16 exact values.
KVRT_INLINE void add_exact_values(float (&sums)[TILES][4], const u8* stage, u32 low, u32 high, u32 low_rest,
                                  u32 high_rest) {
  const int lane = threadIdx.x % WARP;
  // Matrices: channels 0 ... 7 and 8 ... 15 of tokens 0 ... 7, then of tokens 8 ... 15.
  const u8* rows = stage + EXACT_TOKENS * ROW_BYTES + (lane % 8 + lane / 16 * 8) * ROW_BYTES + lane / 8 % 2 * 16;
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    u32 a[4];
    ptx::load_matrix4_transposed(a, rows + s * 32);
    mma_exact(sums[s], a, low, high);
#if K_KIND == 2
    mma_exact(sums[s], a, low_rest, high_rest);
#endif
  }
}

// Weights of 16 tokens as B fragments.
KVRT_INLINE void make_weights(u32& low, u32& high, const float (&weights)[4]) {
#if K_KIND == 2
  low = ptx::transpose8x8(ptx::pack_bfloat(weights[0], weights[1]));
  high = ptx::transpose8x8(ptx::pack_bfloat(weights[2], weights[3]));
#else
  low = ptx::transpose8x8(ptx::pack_half(weights[0], weights[1]));
  high = ptx::transpose8x8(ptx::pack_half(weights[2], weights[3]));
#endif
}

KVRT_INLINE void attend_exact(Softmax& state, const u8* stage, const Query& query, const float (&unscale)[2],
                              const Unit& unit) {
  float scores[1][4];
  exact_scores(scores[0], stage, query);
  state.step<1>(scores, unscale, unit.low, unit.count);
  u32 low, high, low_rest = 0, high_rest = 0;
  make_weights(low, high, scores[0]);
#if K_KIND == 2
  const float2 a = ptx::unpack_bfloat(ptx::pack_bfloat(scores[0][0], scores[0][1]));
  const float2 b = ptx::unpack_bfloat(ptx::pack_bfloat(scores[0][2], scores[0][3]));
  const float rest[4] = {scores[0][0] - a.x, scores[0][1] - a.y, scores[0][2] - b.x, scores[0][3] - b.y};
  make_weights(low_rest, high_rest, rest);
#endif
  add_exact_values(state.sums, stage, low, high, low_rest, high_rest);
}

#if K_CODEC != 0
KVRT_INLINE void attend_page(Softmax& state, const u8* run, const Query& query, const float (&unscale)[2],
                             const Unit& unit, const i64* layer, int head) {
  float scores[4][4];
  page_scores(scores, run, query, reinterpret_cast<const float*>(layer[VIEW_KEY_SIDE + VIEW_STATE]), head);
  state.step<4>(scores, unscale, unit.low, unit.count);
  Weights weights;
#pragma unroll
  for (int j = 0; j < 4; ++j) make_weights(weights.low[j], weights.high[j], scores[j]);
  add_page_values(state.sums, state.minima, run, weights,
                  reinterpret_cast<const float*>(layer[VIEW_VALUE_SIDE + VIEW_STATE]), head);
}
#endif

// out (heads, HEAD_DIM) f32 = attention of q (heads, HEAD_DIM) f32, after RoPE, over everything in a layer.
//
// layer: settings (VIEW_LAYER_SETTINGS,); lengths: sinks, pages, tail tokens, tail slot, addresses of the page table and
// of the table of angles; scale is that of the softmax times log2(e); group: query heads a KV head; a positive window:
// the last so many tokens are seen. partials (gridDim.y * gridDim.x * 8 * (HEAD_DIM + 2),) f32 and arrivals (gridDim.y,),
// zeros before and after, are scratch.
extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS_AN_SM)
attend(const float* q, const i64* layer, const i64* lengths, float scale, int group, int window, float* partials,
       int* arrivals, float* out) {
  KVRT_DYNAMIC_SHARED(shared);
  __shared__ int is_last;
  float* queries = reinterpret_cast<float*>(shared);  // (8, HEAD_DIM)
  u8* rings = shared + 8 * HEAD_DIM * 4;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int tiles = (group + 7) / 8, head = blockIdx.y / tiles, tile = blockIdx.y % tiles;
  const int heads = group - 8 * tile < 8 ? group - 8 * tile : 8;  // query heads of this CTA
  const i64 first_head = i64(head) * group + 8 * tile;
  const Work work(layer, lengths, window);
  const int units = work.units(), step = gridDim.x * WARPS;
  const int active = min(int(gridDim.x), (units + WARPS - 1) / WARPS);
  if (int(blockIdx.x) >= active) return;

  u8* ring = rings + warp * STAGES * STAGE_BYTES;
  int asked = blockIdx.x * WARPS + warp;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (asked < units) {
      const Unit unit(work, asked);
      if (unit.seen()) fetch(ring + i * STAGE_BYTES, work, unit, layer, head);
    }
    ptx::commit_copies();
    asked += step;
  }
  for (int i = threadIdx.x; i < 8 * HEAD_DIM; i += WARPS * WARP)
    queries[i] = i / HEAD_DIM < heads ? q[first_head * HEAD_DIM + i] * scale : 0.0f;
  __syncthreads();

  Softmax state;
  Query query;
  float unscale[2];
  const float* bases = reinterpret_cast<const float*>(work.extent.bases);
  const float* factors = K_NORM ? reinterpret_cast<const float*>(layer[VIEW_KEY_NORM]) + head * HEAD_DIM : nullptr;
  int made = -1, stage = 0;
  for (int index = blockIdx.x * WARPS + warp; index < units; index += step) {
    const Unit unit(work, index);
    {
      const int last = stage == 0 ? STAGES - 1 : stage - 1;
      if (asked < units) {
        const Unit next(work, asked);
        if (next.seen()) fetch(ring + last * STAGE_BYTES, work, next, layer, head);
      }
      ptx::commit_copies();
      asked += step;
    }
    // The query is made anew where it is another: for each page, or for packed keys that were divided by factors.
    const int wanted = FORM == VIEW_PAGE ? unit.block : K_NORM && unit.packed;
    if (wanted != made) {
      make_query(query, queries, FORM == VIEW_PAGE ? bases + i64(unit.block) * HEAD_DIM : nullptr,
                 unit.packed ? factors : nullptr);
      unscale[0] = __shfl_sync(ALL_LANES, query.unscale, lane % 4 * 8);
      unscale[1] = __shfl_sync(ALL_LANES, query.unscale, lane % 4 * 8 + 4);
      made = wanted;
    }
    ptx::wait_copies<STAGES - 1>();
    __syncwarp();
    if (unit.seen()) {
#if K_CODEC != 0
      if (unit.packed)
        attend_page(state, ring + stage * STAGE_BYTES, query, unscale, unit, layer, head);
      else
#endif
        attend_exact(state, ring + stage * STAGE_BYTES, query, unscale, unit);
    }
    __syncwarp();
    if (++stage == STAGES) stage = 0;
  }
  ptx::wait_copies<0>();
  __syncthreads();

  // The CTA's warps become one state, the CTAs of a head one result.
  float* stats = reinterpret_cast<float*>(rings);  // (WARPS, 8, 2)
  float* result_stats = stats + WARPS * 16;        // (8, 2)
  float* result = result_stats + 16;               // (8, HEAD_DIM)
  float* sums = result + 8 * HEAD_DIM;             // (WARPS, 8, HEAD_DIM)
  float* weights = sums + WARPS * 8 * HEAD_DIM;    // (8, WARPS); of all splits: from sums on
  write_state(sums + warp * 8 * HEAD_DIM, stats + warp * 16, state);
  __syncthreads();
  merge(sums, stats, WARPS, heads, weights, result, result_stats);
  float* all_stats = partials + i64(gridDim.y) * gridDim.x * 8 * HEAD_DIM + i64(blockIdx.y) * gridDim.x * 16;
  float* all_sums = partials + i64(blockIdx.y) * gridDim.x * 8 * HEAD_DIM;
  float4* mine = reinterpret_cast<float4*>(all_sums + i64(blockIdx.x) * 8 * HEAD_DIM);
  if (active > 1) {
    for (int i = threadIdx.x; i < heads * HEAD_DIM / 4; i += WARPS * WARP)
      mine[i] = reinterpret_cast<const float4*>(result)[i];
    if (threadIdx.x < 16) all_stats[blockIdx.x * 16 + threadIdx.x] = result_stats[threadIdx.x];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(arrivals + blockIdx.y, 1) == active - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    merge(all_sums, all_stats, active, heads, sums, result, result_stats);
  }
  for (int i = threadIdx.x; i < heads * HEAD_DIM; i += WARPS * WARP) result[i] /= result_stats[2 * (i / HEAD_DIM) + 1];
  __syncthreads();
#if V_HADAMARD > 0
  for (int bit = 1; bit < V_HADAMARD; bit *= 2) {
    for (int i = threadIdx.x; i < heads * HEAD_DIM / 2; i += WARPS * WARP) {
      const int at = i / bit * 2 * bit + i % bit;
      butterfly(result[at], result[at + bit]);
    }
    __syncthreads();
  }
#endif
  const float norm = V_HADAMARD > 0 ? rsqrtf(float(V_HADAMARD)) : 1.0f;
  for (int i = threadIdx.x; i < heads * HEAD_DIM; i += WARPS * WARP) out[first_head * HEAD_DIM + i] = result[i] * norm;
  if (threadIdx.x == 0) arrivals[blockIdx.y] = 0;
}
