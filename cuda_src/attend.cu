// Decode attention: one query token over sinks, sealed pages and tail of one layer, split among CTAs, and combined.
//
// A grid of (splits, KV heads * tiles of 8 query heads). The work of a head is a list of units: packed pages of 64
// tokens, or 16 exact tokens, which all warps of the head share (`Work`). A warp fetches the bytes of a unit into a
// ring of its own in shared memory, and keeps a running softmax (Milakov and Gimelshein 2018) in registers. Keys, and
// values transposed, are the wide operand A of mma.m16n8k16, query heads are N, so each byte is read once for a whole
// group. The last CTA of a head to begin combines what the others send.
//
// Compiled with -D for one layout: HEAD_DIM, FORM, K_HADAMARD, V_HADAMARD (block or 0), K_NORM, RUN_BYTES and, of each
// side, K_CODEC, K_KIND (of exact tokens), K_CODES_OFFSET, K_META_OFFSET and the codec's own (K_BITS, K_GROUP, K_MODE,
// K_BY_ROWS; K_E4M3; K_SLOTS). In the first TURNED_TILES tiles of channels keys before RoPE must be turned; K_BIAS says
// whether keys lack a bias, EXTRA_BYTES how much the tables take, SHARED_BYTES how much is asked for in all.
// FEW_HEADS says that a group has four query heads at most, where that makes a difference.
// WARPS, STAGES, CTAS_AN_SM may be set; LOOKUP says whether levels of non-uniform integers are looked up in a table,
// BY_SIDE whether a stage of a ring holds one side of a unit: pages may be too large for rings of many warps.
#ifndef WARPS
#define WARPS 4
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef CTAS_AN_SM
#define CTAS_AN_SM 3
#endif
#ifndef LOOKUP
#define LOOKUP 0
#endif
#ifndef BY_SIDE
#define BY_SIDE 0
#endif
#ifndef FEW_HEADS
#define FEW_HEADS 0
#endif

#include "attend_softmax.cuh"
#include "attend_units.cuh"

static_assert((K_CODEC == 0) == (V_CODEC == 0), "keys and values are both dense or both packed");
static_assert((K_KIND == 2) == (V_KIND == 2), "a layer is bf16 on both sides or on none");
static_assert(K_KIND != 2 || TURNED_TILES == TILES, "what slow tiles are multiplied with are halves");
static_assert(8 * QUERY_PITCH * 4 + EXTRA_BYTES + WARPS * STAGES * STAGE_BYTES == SHARED_BYTES,
              "attend_variant.py counts otherwise");
static_assert(!BY_SIDE || !VALUES_IN_PLACE_OF_KEYS, "values are fetched to where a page's keys were");
static_assert(RUN_BYTES % 16 == 0 && VALUES_AT % 16 == 0, "copies are of 16 bytes");
static_assert(STATE_FLOATS * 4 <= STAGE_BYTES, "a warp's state goes where its ring was");

KVRT_INLINE void mma_exact(float* sums, const u32 (&a)[4], u32 low, u32 high) {
#if K_KIND == 2
  ptx::mma_bfloat(sums, a[0], a[1], a[2], a[3], low, high);
#else
  ptx::mma_half(sums, a[0], a[1], a[2], a[3], low, high);
#endif
}

// Scores of 16 exact keys.
KVRT_INLINE void exact_scores(float (&scores)[4], const u8* stage, const Query& query, const Tables& tables, int tile) {
  const int lane = threadIdx.x % WARP;
#if FORM != VIEW_PRE
  if (LESS_HIGH != 1 && TILES % 2 == 0) {
    // Two tiles at a time of one half of the head: the query is in the order of registers that packed keys want.
    // Matrices: tokens 0 ... 7 and 8 ... 15 of the first tile's channels, then of the second's.
    const u8* rows = stage + lane % 16 * ROW_BYTES + lane / 16 * 16;
    float high[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] = 0;
#pragma unroll
    for (int s = 0; s < TILES; s += 2) {
      u32 a[4];
      ptx::load_matrix4(a, rows + s * 16);
      mma_exact(scores, a, query.low[s], query.low[s + 1]);
      ptx::load_matrix4(a, rows + HALF * 2 + s * 16);
      mma_exact(high, a, query.high[s], query.high[s + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] += high[i] * LESS_HIGH;
    return;
  }
#endif
  // Matrices: tokens 0 ... 7 and 8 ... 15 of the low half's channels, then of the high half's.
  const u8* rows = stage + lane % 16 * ROW_BYTES + lane / 16 * HALF * 2;
  float slopes[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 4; ++i) scores[i] = 0;
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    u32 a[4];
    ptx::load_matrix4(a, rows + s * 16);
    if (s >= TURNED_TILES) {
      const TileQuery slow(query, tables, s);
      mma_exact(FEW_HEADS ? slopes : scores, a, slow.low, slow.high);
      if (!FEW_HEADS) mma_exact(slopes, a, slow.low_slope, slow.high_slope);
      continue;
    }
#if FORM == VIEW_PRE && K_KIND == 2
    u32 rest[4];
    turn_bfloats(a, rest, tables.turn(tile, s));
    mma_exact(scores, rest, query.low[s], query.high[s]);
#elif FORM == VIEW_PRE
    turn_tile(a, tables.turn(tile, s));
#endif
    mma_exact(scores, a, query.low[s], scale_half2(query.high[s], LESS_HIGH));
#if K_KIND == 2
    mma_exact(scores, a, query.low_rest[s], query.high_rest[s]);
#endif
  }
  if (HAS_SLOW)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] += on_line(slopes[i], place_in_block(tile, i >> 1));
}

// Weighted sums += weights * 16 exact values.
KVRT_INLINE void add_exact_values(Softmax& state, const u8* stage, u32 low, u32 high, u32 low_rest, u32 high_rest) {
  const int lane = threadIdx.x % WARP;
  // Matrices: channels 0 ... 7 and 8 ... 15 of tokens 0 ... 7, then of tokens 8 ... 15.
  const u8* rows = stage + EXACT_SIDE_BYTES + (lane % 8 + lane / 16 * 8) * ROW_BYTES + lane / 8 % 2 * 16;
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    u32 a[4];
    ptx::load_matrix4_transposed(a, rows + s * 32);
    if (V_RAW) {
      float sum[4] = {0, 0, 0, 0};
      mma_exact(sum, a, low, high);
#pragma unroll
      for (int i = 0; i < 4; ++i) state.sums[s][i] += sum[i] * (1.0f / unit_of_sums(i));
      continue;
    }
    mma_exact(state.sums[s], a, low, high);
#if K_KIND == 2
    mma_exact(state.sums[s], a, low_rest, high_rest);
#endif
  }
#if V_CODEC == 1 || V_CODEC == 2
  const u32 ones = lane / 4 < V_GROUPS ? 0 : ONES;
  if (TOTAL_IN_TILE) ptx::mma_half(state.minima[0], ones, 0, ones, 0, low, high);
#endif
}

template <typename Values>
KVRT_INLINE void attend_exact(Softmax& state, const u8* stage, const Query& query, const float (&unscale)[2],
                              const Unit& unit, const Tables& tables, const float* base, const Values& values) {
  float scores[1][4];
  const int tile = int(unit.row) / EXACT_TOKENS % 4;  // of the block
  exact_scores(scores[0], stage, query, tables, tile);
  if (K_BIAS) add_bias(scores, tables, base, tile, unscale);
  Weighted<1> weighted;
  state.step<1>(weighted, scores, Affine<1>(), unscale, unit.low, unit.count);
  const u32 low = ptx::transpose8x8(weighted.rows[0][0]), high = ptx::transpose8x8(weighted.rows[0][1]);
  u32 low_rest = 0, high_rest = 0;
#if K_KIND == 2
  const float(&x)[4] = weighted.weights[0];
  const float2 a = ptx::unpack_bfloat(weighted.rows[0][0]), b = ptx::unpack_bfloat(weighted.rows[0][1]);
  low_rest = ptx::transpose8x8(ptx::pack_bfloat(x[0] - a.x, x[1] - a.y));
  high_rest = ptx::transpose8x8(ptx::pack_bfloat(x[2] - b.x, x[3] - b.y));
#endif
  add_exact_values(state, values(), low, high, low_rest, high_rest);
}

#if K_CODEC != 0
template <typename Values>
KVRT_INLINE void attend_page(Softmax& state, const u8* run, const Query& query, const float (&unscale)[2], int unseen,
                             const float (&scales)[2], int head, const Tables& tables, const float* base,
                             const Values& values) {
  float scores[4][4];
  Affine<4> affine;
  page_scores(scores, affine, run, query, tables, scales[0]);
  if (K_BIAS) {
    affine.apply(scores);
    add_bias(scores, tables, base, 0, unscale);
  }
  Weighted<4> weighted;
  state.step<4>(weighted, scores, affine, unscale, unseen, PAGE_TOKENS);
  Weights weights;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    weights.low[j] = ptx::transpose8x8(weighted.rows[j][0]);
    weights.high[j] = ptx::transpose8x8(weighted.rows[j][1]);
  }
  add_page_values(state.sums, state.minima, values(), weights, tables, scales[1], head);
}
#endif

// queries (8, QUERY_PITCH) f32 = q (heads, HEAD_DIM) times scale, and zeros.
KVRT_INLINE void read_queries(float* queries, const float* q, int heads, float scale) {
  constexpr int COUNT = 8 * HEAD_DIM / 4, EACH = (COUNT + WARPS * WARP - 1) / (WARPS * WARP);
  float4 parts[EACH];  // all loads before all stores: they do not wait for each other
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const int i = threadIdx.x + n * WARPS * WARP;
    parts[n] = {0, 0, 0, 0};
    if (i < heads * HEAD_DIM / 4) parts[n] = reinterpret_cast<const float4*>(q)[i];
  }
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const int i = threadIdx.x + n * WARPS * WARP;
    const float4& x = parts[n];
    const int head = i / (HEAD_DIM / 4), part = i % (HEAD_DIM / 4);
    if (i < COUNT)
      reinterpret_cast<float4*>(queries)[head * (QUERY_PITCH / 4) + part] = {x.x * scale, x.y * scale, x.z * scale,
                                                                         x.w * scale};
  }
}

// Ask for what comes STAGES - 1 pieces after one of a unit, and read the page table for the unit after.
KVRT_INLINE void fetch_after(int piece, const Ring& ring, const Work& work, int& asked, i64& next_page,
                             const i64* layer, int head) {
  const int next = (piece + STAGES - 1) % PIECES;
  ring.fetch(work, asked, next, next_page, layer, head);
  if (next < PIECES - 1) return;
  asked = work.next(asked);
  next_page = work.page(asked);
}

// out (heads, HEAD_DIM) f32 = attention of q (heads, HEAD_DIM) f32, after RoPE, over everything in a layer.
//
// layer: settings (VIEW_LAYER_SETTINGS,); lengths: sinks, pages, tail tokens, tail slot, addresses of the page table
// and of the table of angles; scale is that of the softmax times log2(e); group: query heads a KV head; a positive
// window: the last so many tokens are seen. partials (gridDim.y * gridDim.x * 8 * (HEAD_DIM + 2),) f32 and arrivals
// (gridDim.y,), zeros before and after, are scratch.
//
// Settings, lengths, tables and pages are read before the kernel ahead has ended: none of a step's kernels writes them.
extern "C" __global__ void __launch_bounds__(WARPS * 32, CTAS_AN_SM)
attend(const float4* q, const i64* layer, const i64* lengths, float scale, int group, int window, float4* partials,
       int* arrivals, float4* out) {
  KVRT_DYNAMIC_SHARED(shared);
  __shared__ u64 barriers[WARPS * STAGES];
  __shared__ int ticket;
  ptx::let_next_start();
  float* queries = reinterpret_cast<float*>(shared);  // (8, QUERY_PITCH)
  const Tables tables{shared + 8 * QUERY_PITCH * 4, 0x64006400u | u32(group) >> 31};
  u8* rings = tables.place + EXTRA_BYTES;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int tiles = (group + 7) / 8, head = blockIdx.y / tiles, tile = blockIdx.y % tiles;
  const int heads = group - 8 * tile < 8 ? group - 8 * tile : 8;  // query heads of this CTA
  const i64 first_head = i64(head) * group + 8 * tile;
  const Places places(layer, lengths);
  const Sources sources(layer);
  Ring ring(rings + warp * STAGES * STAGE_BYTES, barriers + warp * STAGES);
  const Work work(places, head, window, gridDim.x * WARPS);
  const int units = work.units;
  const int active = min(int(gridDim.x), units);
  if (int(blockIdx.x) >= active) {
    ptx::wait_for_previous();
    return;
  }

  // Units go to the first warps of all CTAs, then to the second ones: what is left over is spread over all CTAs.
  const int start = warp * gridDim.x + blockIdx.x;
  int asked = start;
  constexpr int AHEAD = (STAGES - 1) / PIECES;  // whole units that are asked for at first
  i64 pages[AHEAD + 1];                         // the page table is read one unit ahead
#pragma unroll
  for (int i = 0; i <= AHEAD; ++i) pages[i] = work.page(start + i * work.warps);
  const Fitted fitted(sources, head);
  const SlowTurns slow(sources.turns);
  QuickTurns quick(sources.turns);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    ring.fetch(i, work, asked, i % PIECES, pages[i / PIECES], layer, head);
    if (i % PIECES == PIECES - 1) asked = work.next(asked);
  }
  i64 next_page = pages[AHEAD];
  quick.write(tables, sources.turns);
  slow.write(tables);
  fitted.write(tables);
  fill_left_out(tables, sources, head);
  ptx::wait_for_previous();
  int my_ticket = 0;
  if (threadIdx.x == 0) my_ticket = atomicAdd(arrivals + blockIdx.y, 1);
  const float* my_q = reinterpret_cast<const float*>(q) + first_head * HEAD_DIM;
  const float scales[2] = {K_CODEC == 3 ? ptx::load_early(sources.key_scales + head) : 1.0f,  // of fp8
                           V_CODEC == 3 ? ptx::load_early(sources.value_scales + head) : 1.0f};
  read_queries(queries, my_q, heads, scale);
  fill_bias(tables, queries);
  __syncthreads();

  Softmax state;
  Query query;
  float unscale[2];
  const float* factors = K_NORM ? reinterpret_cast<const float*>(layer[VIEW_KEY_NORM]) + head * HEAD_DIM : nullptr;
  const auto spread_unscale = [&] {
    unscale[0] = __shfl_sync(ALL_LANES, query.unscale, lane % 4 * 8);
    unscale[1] = __shfl_sync(ALL_LANES, query.unscale, lane % 4 * 8 + 4);
  };
  if (SAME_NORM) {
    find_scale(query, queries);
    spread_unscale();
  }
  if (!BY_BLOCK && SAME_NORM) make_query(query, queries, nullptr, nullptr);
  if (KEEPS_FOUR) {
    read_four(query.kept, query, queries);
    if (HAS_SLOW) keep_middle(query.kept, tables);
  }
  int made = -1;
  for (int index = start; index < units; index = work.next(index)) {
    fetch_after(0, ring, work, asked, next_page, layer, head);

    const bool packed = work.packed(index);
    u8* bytes = ring.here;
    const float* base = reinterpret_cast<const float*>(bytes + UNIT_BYTES);
    // The query is made anew where it is another: for each page, or for packed keys that were divided by factors.
    const auto prepare = [&](int wanted) {
      if ((!BY_BLOCK && SAME_NORM) || wanted == made) return;
#if FEW_HEADS
      make_four(query, queries, base, packed ? factors : nullptr);
#else
      make_query(query, queries, BY_BLOCK ? base : nullptr, packed ? factors : nullptr);
#endif
      if (HAS_SLOW && !KEEPS_FOUR) go_to_middle(query, tables);
      if (!SAME_NORM) spread_unscale();
      made = wanted;
    };
    // Where the unit's bytes are, of which only values are wanted from here on.
    const auto values = [&] {
      if (!BY_SIDE) return bytes;
      ring.release();
      fetch_after(1, ring, work, asked, next_page, layer, head);
      ring.wait(packed);
      return ring.here - (packed ? VALUES_AT : EXACT_SIDE_BYTES);
    };
    if (packed) {
#if K_CODEC != 0
      if (ANGLE_BYTES > 0) ring.wait(true);
      prepare(BY_BLOCK ? work.block + index : K_NORM);
      if (ANGLE_BYTES == 0) ring.wait(true);
      attend_page(state, bytes, query, unscale, work.unseen(index), scales, head, tables, base, values);
#endif
    } else {
      const Unit unit(work, index);
      ring.wait(false);
      if (unit.seen()) {
        prepare(BY_BLOCK ? unit.block : 0);
        attend_exact(state, bytes, query, unscale, unit, tables, base, values);
      } else {
        values();
      }
    }
    ring.release();
  }
  ptx::wait_copies<0>();
  __syncwarp();

  // The CTA's warps become one state, the CTAs of a head one result, in the CTA that was the last to begin.
  write_state(reinterpret_cast<float*>(ring.place), state, heads);
  if (threadIdx.x == 0) ticket = my_ticket;
  __syncthreads();
  const bool last = ticket == active - 1;
  float* all_sums = reinterpret_cast<float*>(partials);
  float2* all_stats = reinterpret_cast<float2*>(all_sums + i64(gridDim.y) * gridDim.x * 8 * HEAD_DIM);
  for (int h = warp; h < heads; h += WARPS) {
    HeadState mine;
    merge_warps(mine, reinterpret_cast<const float*>(rings), STAGES * STAGE_BYTES / 4, h);
    const i64 first = i64(blockIdx.y) * gridDim.x * 8;
    const Handed handed{all_sums + first * HEAD_DIM + h * HEAD_DIM, all_stats + first + h};
    send(mine, handed.from(blockIdx.x));
    if (!last) continue;
    HeadState merged;
    receive<16 / PARTS>(merged, handed, active);
    finish(merged, reinterpret_cast<float*>(out) + (first_head + h) * HEAD_DIM);
  }
  if (last && threadIdx.x == 0) arrivals[blockIdx.y] = 0;
}
