// Decode attention over pages whose keys and values are product-residual codes (pq8x256), exact sinks and tail among
// them: one query token of one layer, split among CTAs, and combined.
//
// A grid of (splits, KV heads * tiles of 4 query heads), units and warps as in attend.cu. No key is made: what each
// entry of a key book brings to the scores of the queries is a table in shared memory, made anew by each CTA, and a
// score is a sum of its entries. Values are made in registers, out of the value books in shared memory.
//
// Compiled with -D for one layout: HEAD_DIM, K_HADAMARD and V_HADAMARD (block or 0), RUN_BYTES, K_CODES_OFFSET,
// V_CODES_OFFSET, K_STAGES, V_STAGES, K_PER_HEAD, V_PER_HEAD (whether heads have books of their own), WARPS;
// SHARED_BYTES says how much is asked for.
#include "attend_books.cuh"
#include "attend_units.cuh"

// Shared memory: value books, the table of scores (at last what warps have found), weights, queries, units of keys.
static constexpr int STATE_BYTES = WARPS * STATE_FLOATS * 4, SCORES_AT = VALUES_BYTES;
static constexpr int WEIGHTS_AT = SCORES_AT + (SCORES_BYTES > STATE_BYTES ? SCORES_BYTES : STATE_BYTES);
static constexpr int QUERIES_AT = WEIGHTS_AT + WARPS * HeadSoftmax::BYTES;
static constexpr int UNITS_AT = QUERIES_AT + HEADS * QUERY_PITCH * 4;
static_assert(UNITS_AT + KeyUnits::BYTES == SHARED_BYTES, "books_variant.py counts otherwise");

// q (HEADS, QUERY_PITCH) f32 in shared memory as B fragments, in two halves each.
struct ExactQuery {
  u32 high[TILES][2], low[TILES][2];

  KVRT_INLINE explicit ExactQuery(const float* queries) {
    const int lane = threadIdx.x % WARP, head = lane / 4;
#pragma unroll
    for (int s = 0; s < TILES; ++s)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float2 x = {0, 0};
        if (head < HEADS) x = load_pair(queries + head * QUERY_PITCH + 16 * s + 8 * i + lane % 4 * 2);
        high[s][i] = ptx::pack_half(x.x, x.y);
        const float2 rounded = ptx::unpack_half(high[s][i]);
        low[s][i] = ptx::pack_half(x.x - rounded.x, x.y - rounded.y);
      }
  }
};

// 16 exact tokens, straight from memory: there are few of them.
struct ExactRows {
  const u8* rows;
  int count;

  // Two neighbours of a row, zeros where there is none.
  KVRT_INLINE u32 pair(int token, int channel) const {
    if (token >= count) return 0;
    const u8* place = rows + token * (HEAD_DIM * 2) + channel * 2;
    return __float_as_uint(ptx::load_early(reinterpret_cast<const float*>(place)));
  }
};

KVRT_INLINE void attend_exact(HeadSoftmax& state, const ExactQuery& query, const Unit& unit, const u8* keys,
                              const u8* values) {
  const int lane = threadIdx.x % WARP;
  const ExactRows key_rows{keys, unit.count}, value_rows{values, unit.count};
  float found[4] = {};
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    u32 a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = key_rows.pair(lane / 4 + 8 * (i & 1), 16 * s + 8 * (i >> 1) + lane % 4 * 2);
    ptx::mma_half(found, a[0], a[1], a[2], a[3], query.high[s][0], query.high[s][1]);
    ptx::mma_half(found, a[0], a[1], a[2], a[3], query.low[s][0], query.low[s][1]);
  }
  // Lane l % 16 takes the token of that number; the others have none.
  float scores[1][4];
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    const int from = lane % 8 * 4 + h / 2;
    const float low = __shfl_sync(ALL_LANES, found[h % 2], from), high = __shfl_sync(ALL_LANES, found[2 + h % 2], from);
    scores[0][h] = lane % 16 < 8 ? low : high;
  }
  state.step<1, 0>(scores, lane, unit.low, unit.count);
  u32 weights[4];
  state.read(weights, 0);
#pragma unroll
  for (int s = 0; s < TILES; ++s) {
    u32 a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] = ptx::transpose8x8(value_rows.pair(lane / 4 + 8 * (i >> 1), channel_of_sum(s, 8 * (i & 1) + lane % 4 * 2)));
    ptx::mma_half(state.sums[s], a[0], a[1], a[2], a[3], weights[0], weights[1]);
  }
}

// queries (HEADS, QUERY_PITCH) f32 = q (heads, HEAD_DIM) times scale, in the basis of the cache, and zeros; shifts
// (HEADS,) = what the keys' centre (HEAD_DIM,) adds to each score. One warp a head.
KVRT_INLINE void read_queries(float* queries, float* shifts, const float* q, const float* centre, int heads,
                              float scale) {
  const int lane = threadIdx.x % WARP, head = threadIdx.x / WARP;
  if (head >= HEADS) return;
  HeadState row;
  float shift = 0;
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const int at = lane + WARP * i;
    if (head >= heads || at >= QUARTERS) continue;
    const float4 x = reinterpret_cast<const float4*>(q + i64(head) * HEAD_DIM)[at];
    row.sums[i] = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
  }
  unrotate(row, K_HADAMARD);
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    const int at = lane + WARP * i;
    if (at >= QUARTERS) continue;
    const float4 x = row.sums[i];
    reinterpret_cast<float4*>(queries + head * QUERY_PITCH)[at] = x;
    const float* c = centre + 4 * at;
    shift += x.x * ptx::load_early(c) + x.y * ptx::load_early(c + 1) + x.z * ptx::load_early(c + 2) +
             x.w * ptx::load_early(c + 3);
  }
  shift = warp_sum(shift);
  if (lane == 0) shifts[head] = shift;
}

// As `attend` of attend.cu, with `partials` and `arrivals` for tiles of 4 query heads.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
attend(const float4* q, const i64* layer, const i64* lengths, float scale, int group, int window, float4* partials,
       int* arrivals, float4* out) {
  KVRT_DYNAMIC_SHARED(shared);
  __shared__ u64 arrival;
  __shared__ int ticket;
  __shared__ float shifts[HEADS];
  ptx::let_next_start();
  float* queries = reinterpret_cast<float*>(shared + QUERIES_AT);  // (HEADS, QUERY_PITCH)
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int tiles = (group + HEADS - 1) / HEADS, head = blockIdx.y / tiles, tile = blockIdx.y % tiles;
  const int heads = min(group - HEADS * tile, HEADS);  // query heads of this CTA
  const i64 first_head = i64(head) * group + HEADS * tile;
  const Places places(layer, lengths);
  const u8* key_books = reinterpret_cast<const u8*>(ptx::load_early(layer + VIEW_KEY_SIDE + VIEW_TABLE));
  const u8* value_books = reinterpret_cast<const u8*>(ptx::load_early(layer + VIEW_VALUE_SIDE + VIEW_TABLE));
  const i64 all_heads = ptx::load_early(layer + VIEW_HEADS);
  const Work work(places, head, window, gridDim.x * WARPS);
  const int units = work.units;
  const int active = min(int(gridDim.x), units);
  if (int(blockIdx.x) >= active) {
    ptx::wait_for_previous();
    return;
  }

  const int start = warp * gridDim.x + blockIdx.x;
  const bool has_pages = work.packed(blockIdx.x);  // whether any of the CTA's units is one
  i64 page = work.page(start), next_page = work.page(work.next(start));
  // Tables: entries, norms, then of keys centre, scale, inverse, order. A stage has a set of books for all heads, or
  // one for each.
  constexpr i64 KEY_SET = GROUPS * ENTRIES, VALUE_SET = KEY_SET * ENTRY_BYTES;
  const i64 row = i64(head) * HEAD_DIM, plane = all_heads * HEAD_DIM, sets = K_PER_HEAD ? all_heads : 1;
  const float* centre = reinterpret_cast<const float*>(key_books + K_STAGES * sets * KEY_SET * (ENTRY_BYTES + 4));
  const KeyUnits key_units(shared + UNITS_AT);
  const BookCopy copy{&arrival};
  const i64 value_sets = V_PER_HEAD ? all_heads : 1;
  if (has_pages) copy.ask(shared, value_books + (V_PER_HEAD ? head * VALUE_SET : 0), value_sets * VALUE_SET);
  const ScoreTable scores_of(key_books + (K_PER_HEAD ? head * KEY_SET * ENTRY_BYTES : 0), int(sets), has_pages);
  for (int c = threadIdx.x; c < HEAD_DIM; c += WARPS * WARP) {
    key_units.inverse[c] = ptx::load_early(centre + 2 * plane + row + c);
    key_units.order[c] = int(__float_as_uint(ptx::load_early(centre + 3 * plane + row + c)));
  }
  PageCodes<K_BOOKS> keys;
  if (work.packed(start)) keys.load(reinterpret_cast<const u8*>(page + work.run + K_CODES_OFFSET));
  ptx::wait_for_previous();
  int my_ticket = 0;
  if (threadIdx.x == 0) my_ticket = atomicAdd(arrivals + blockIdx.y, 1);
  read_queries(queries, shifts, reinterpret_cast<const float*>(q) + first_head * HEAD_DIM, centre + row, heads, scale);
  __syncthreads();
  if (has_pages) {
    scores_of.write(shared + SCORES_AT, queries, key_units);
    copy.wait_for_own();
  }
  __syncthreads();
  if (has_pages) copy.wait();

  HeadSoftmax state(shared + WEIGHTS_AT + warp * HeadSoftmax::BYTES);
  const ExactQuery query(queries);
  const BookScores scoring(shared + SCORES_AT);
  const BookValues values(shared);
  for (int index = start, next; index < units; index = next) {
    next = work.next(index);
    if (work.packed(index)) {
      PageCodes<V_BOOKS> codes;
      codes.load(reinterpret_cast<const u8*>(page + work.run + V_CODES_OFFSET));
      page = next_page;
      next_page = work.page(work.next(next));
      float scores[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int h = 0; h < HEADS; ++h) scores[i][h] = shifts[h];
      scoring.add(scores, keys);
      if (work.packed(next)) keys.load(reinterpret_cast<const u8*>(page + work.run + K_CODES_OFFSET));
      state.step<2, 32>(scores, lane % 4 * 8 + lane / 4, work.unseen(index), PAGE_TOKENS);
      values.add(state, codes);
    } else {
      const Unit unit(work, index);
      if (!unit.seen()) continue;
      const i64 first = (head * i64(unit.sink ? work.sink_rows : work.tail_rows) + unit.row) * (HEAD_DIM * 2);
      const i64* arrays = layer + (unit.sink ? VIEW_SINK_KEYS : VIEW_TAIL_KEYS);
      attend_exact(state, query, unit, reinterpret_cast<const u8*>(arrays[0] + first),
                   reinterpret_cast<const u8*>(arrays[1] + first));
    }
  }

  // The CTA's warps become one state, the CTAs of a head one result, in the CTA that was the last to begin.
  __syncthreads();  // the table of scores is no longer read
  float* states = reinterpret_cast<float*>(shared + SCORES_AT);
  state.write(states + warp * STATE_FLOATS, heads);
  if (threadIdx.x == 0) ticket = my_ticket;
  __syncthreads();
  const bool last = ticket == active - 1;
  float* all_sums = reinterpret_cast<float*>(partials);
  float2* all_stats = reinterpret_cast<float2*>(all_sums + i64(gridDim.y) * gridDim.x * 8 * HEAD_DIM);
  for (int h = warp; h < heads; h += WARPS) {
    HeadState mine;
    merge_warps(mine, states, STATE_FLOATS, h);
    const i64 at = i64(blockIdx.y) * gridDim.x * 8;
    const Handed handed{all_sums + at * HEAD_DIM + h * HEAD_DIM, all_stats + at + h};
    send(mine, handed.from(blockIdx.x));
    if (!last) continue;
    HeadState merged;
    receive<16 / PARTS>(merged, handed, active);
    finish(merged, reinterpret_cast<float*>(out) + (first_head + h) * HEAD_DIM);
  }
  if (last && threadIdx.x == 0) arrivals[blockIdx.y] = 0;
}
