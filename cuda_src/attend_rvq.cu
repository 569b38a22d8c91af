// Decode attention over pages whose keys and values are both residual vector quantised, without reconstructing them.
//
// A key is a sum of book entries, so its score is a sum of lookups in what entries are worth to the query; a weighted
// mean of values is one of entries, weighted by how much weight the tokens with that code have. So three kernels: the
// tables of all heads from the books of keys, then scores, softmax and histograms of weights, then the histograms'
// products with the books of values. Exact tokens are attended by the second one, and merged by the third.
//
// Compiled with -D: HEAD_DIM, K_STAGES, K_BITS, V_STAGES, V_BITS, EXACT_KIND (of exact tokens: 1 f16, 2 bf16),
// RUN_BYTES, K_CODES_OFFSET, V_CODES_OFFSET, SHARED_BYTES (of the second kernel); WARP_PAGES for tests.
#include "rvq_exact.cuh"
#include "rvq_outputs.cuh"
#include "rvq_scores.cuh"
#include "rvq_tables.cuh"

static constexpr int ARENA_BYTES = TABLE_BYTES > HISTOGRAM_BYTES ? TABLE_BYTES : HISTOGRAM_BYTES;
static constexpr int EXACT_BYTES = WARPS * ExactState::FLOATS * 4, WEIGHT_BYTES = WARPS * PageWeights::BYTES;
static constexpr int UNION_BYTES = EXACT_BYTES > WEIGHT_BYTES ? EXACT_BYTES : WEIGHT_BYTES;
static_assert(ARENA_BYTES + UNION_BYTES + RUNS * 8 == SHARED_BYTES, "cuda_rvq.py counts otherwise");
static_assert(WEIGHT_BYTES % 16 == 0 && UNION_BYTES % 16 == 0, "words of 16 bytes");

// tables (tiles of heads, BLOCKS, K_ENTRIES, SLOTS, HEADS) f16; basis (columns, HEAD_DIM) and constants (columns,) f32:
// of q (heads, HEAD_DIM) f32, after RoPE; see rvq_tables.cuh. scale is that of the softmax times log2(e).
//
// Books are read before the kernel ahead has ended: they never change.
extern "C" __global__ void __launch_bounds__(256, 2)
make_tables(const float4* q, const i64* layer, float scale, int group, float4* basis, float* constants, uint4* all) {
  using namespace tables;
  KVRT_DYNAMIC_SHARED(shared);
  ptx::let_next_start();
  const int kv_heads = int(ptx::load_early(layer + VIEW_HEADS));
  const Fitted fitted(layer, kv_heads);
  Queries queries{reinterpret_cast<const float*>(q), kv_heads, group, (group + HEADS - 1) / HEADS, 0, scale};
  queries.hadamard = int(ptx::load_early(layer + VIEW_KEY_HADAMARD));
  const int task = blockIdx.x * tables::WARPS + threadIdx.x / WARP;
  Rows rows;
  if (task < TASKS) rows.read(fitted.entries, task);
  ptx::wait_for_previous();
  const int count = queries.columns();
#pragma unroll 1
  for (int first = 0; first < count; first += COLUMNS) {
    if (first > 0) __syncthreads();
    queries.prepare(shared, first, fitted, reinterpret_cast<float*>(basis), constants);
    __syncthreads();
    if (task < TASKS) rows.multiply(shared, reinterpret_cast<u8*>(all), first / HEADS, count / HEADS);
  }
}

// A grid of (splits, tiles of heads). histograms (tiles, V_STAGES, splits, V_ENTRIES, HEADS) f16 and states (tiles,
// splits, STATE_FLOATS) f32 of what a split has tokens of: see rvq_shape.cuh. A positive window: the last so many
// tokens are seen. The rest is what make_tables gives, and as it takes it.
//
// Settings, lengths and pages are read before the kernels ahead have ended: none of a step's kernels writes them.
extern "C" __global__ void __launch_bounds__(512, 1)
attend_rvq(const i64* layer, const i64* lengths, int group, int window, const float4* basis, const float* constants,
           const uint4* all, uint4* histograms, float* states) {
  KVRT_DYNAMIC_SHARED(shared);
  __shared__ u64 barrier;
  __shared__ Task task;
  __shared__ float4 maxima[WARPS], totals[WARPS];
  __shared__ float2 stats[HEADS];  // (top, total) of what is written down
  __shared__ Chunk chunks[HEADS];
  ptx::let_next_start();
  u8* arena = shared;  // a table, or a histogram
  u8* other = shared + ARENA_BYTES;
  i64* runs = reinterpret_cast<i64*>(other + UNION_BYTES);  // (RUNS,)
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const auto state = [&] { return states + (i64(task.tile) * task.splits + task.split) * STATE_FLOATS; };
  TableCopy copy(&barrier);
  const auto begin_table = [&](int block) {
    const u8* tables = reinterpret_cast<const u8*>(all);
    copy.begin(arena, tables + (i64(task.tile) * BLOCKS + block) * TABLE_BYTES);
  };
  {
    const int tile = blockIdx.y, split = blockIdx.x, splits = gridDim.x;
    const int tiles = (group + HEADS - 1) / HEADS, head = tile / tiles;
    const Tokens tokens(layer, lengths, window);
    const i64 run = ptx::load_early(layer + VIEW_LAYER_OFFSET) + i64(head) * RUN_BYTES;
    const int pages = split < tokens.pages ? (tokens.pages - split + splits - 1) / splits : 0;
    const bool has_exact = split < tokens.with_exact(splits);
    if (pages == 0 && !has_exact) {
      ptx::wait_for_previous();
      return;
    }
    task = {tokens.table + split, run, tile, split, splits, pages, 0, split == 0 ? tokens.unseen : 0};
    task.find_runs(runs);
    ptx::wait_for_previous();
    if (pages > 0) begin_table(0);
    if (has_exact) {
      ExactState exact;
      exact.attend(tokens, layer, head, split + splits * warp, splits * WARPS,
                   reinterpret_cast<const float*>(basis) + tile * HEADS * HEAD_DIM);
      exact.write(reinterpret_cast<float*>(other) + warp * ExactState::FLOATS);
      __syncthreads();
      merge_exact(state(), reinterpret_cast<const float*>(other));
    }
  }
  __syncthreads();

  for (; task.begin < task.pages; task.next(CHUNK)) {
    const int here = min(CHUNK, task.pages - task.begin);
    const OwnPages own{runs, here > warp ? (here - warp + WARPS - 1) / WARPS : 0};
    Scores scores;
    scores.clear();
    if (task.begin > 0) task.find_runs(runs);
#pragma unroll 1
    for (int block = 0; block < BLOCKS; ++block) {
      if (task.begin > 0 || block > 0) begin_table(block);
      const int number = task.begin / CHUNK * BLOCKS + block;
      if (block < FOURS)
        scores.look_up_all<4, 4>(own, 16 * block, arena, copy, number);
      else if (TWOS && block == FOURS)
        scores.look_up_all<2, 4>(own, 16 * FOURS, arena, copy, number);
      else if (ONES && block == FOURS + TWOS)
        scores.look_up_all<1, 4>(own, 16 * FOURS + 8 * TWOS, arena, copy, number);
      else if (RAGGED)
        scores.look_up_all<1, RAGGED ? RAGGED : 1>(own, 4 * QUADS, arena, copy, number);
    }

    if (task.begin == 0 && warp == 0 && task.unseen > 0) scores.hide(task.unseen);
    float top[HEADS] = {NOTHING, NOTHING, NOTHING, NOTHING}, total[HEADS] = {0, 0, 0, 0}, base[HEADS];
    scores.each([&](float& x, int h) { top[h] = fmaxf(top[h], x); }, own.count);
    over_warps<true>(top, &maxima[0].x);
    scores.each([&](float& x, int h) { total[h] += ptx::exp2(x - top[h]); }, own.count);
    over_warps<false>(total, &totals[0].x);
    // 2^31 is to be the sum of all weights, or a little more.
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      const int above = exponent_above(total[h]);
      top[h] += float(above);
      total[h] *= power_of_two(-above);
      base[h] = 31 - top[h];
      if (threadIdx.x == h) chunks[h].begin(stats[h], {top[h], total[h]}, task.begin == 0);
    }
    const PageWeights weights{other + warp * PageWeights::BYTES};
#pragma unroll 1
    for (int part = 0; part < HISTOGRAMS; ++part) {
      const int book = part * V_BOOKS + lane % V_BOOKS;
      const bool has_book = book < V_STAGES;
      const int wanted = has_book ? book : V_STAGES - 1;
      u8* histogram = arena + lane_word() * 4;
      own.prefetch_values(0);
      ValueCodes next;
      next.read(own.run(0), wanted, 0);
      if (part > 0) __syncthreads();  // the one before has been written down
      clear_histogram(arena);
      __syncthreads();
#pragma unroll 1
      for (int i = 0; i < own.count; ++i) {
        PageScores page;
        scores.get(i, page);
        own.prefetch_values(i + 1);
        u32 whole[2][HEADS];
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
          for (int h = 0; h < HEADS; ++h) whole[u][h] = u32(ptx::exp2(page[u][h] + base[h]) + 0.5f);
        __syncwarp();  // those of the page before have been read
        weights.write(whole);
        __syncwarp();
#pragma unroll 1
        for (int piece = 0; piece < PAGE_TOKENS / PIECE; ++piece) {
          const ValueCodes codes = next;
          const bool last = piece + 1 == PAGE_TOKENS / PIECE;
          next.read(own.run(last ? i + 1 : i), wanted, last ? 0 : piece + 1);
          if (has_book) weights.add_piece(histogram, codes, piece);
        }
      }
      __syncthreads();
      const i64 place = (i64(task.tile) * V_STAGES * task.splits + task.split) * V_ENTRIES * HEADS;
      write_histogram(reinterpret_cast<u16*>(histograms) + place, arena, part * V_BOOKS, task.splits, chunks,
                      task.begin == 0);
    }
  }
  const int h = threadIdx.x;  // what is the same for all tokens was left out so far
  if (task.pages > 0 && h < HEADS)
    reinterpret_cast<float2*>(state())[h] = {stats[h].x + constants[task.tile * HEADS + h], stats[h].y};
}

// out (heads, HEAD_DIM) f32 = attention. A grid of (V_STAGES, tiles of heads), each with the weights of one book's
// entries; the last of a tile adds up the others' partials (tiles, V_STAGES, HEADS, HEAD_DIM) f32. arrivals (tiles,),
// zeros before and after. Nothing is written where there are no tokens.
//
// Books are read before the kernel ahead has ended: they never change.
extern "C" __global__ void __launch_bounds__(512, 1)
sum_values(const i64* layer, const i64* lengths, int group, int window, int splits, const uint4* histograms,
           const float* states, float* partials, int* arrivals, float4* out) {
  KVRT_DYNAMIC_SHARED(shared);
  __shared__ int ticket;
  ptx::let_next_start();
  const Tokens tokens(layer, lengths, window);
  const int book = blockIdx.x, tile = blockIdx.y;
  const i64 hadamard = ptx::load_early(layer + VIEW_VALUE_HADAMARD);
  const u16* entries = reinterpret_cast<const u16*>(ptx::load_early(layer + VIEW_VALUE_SIDE + VIEW_TABLE)) +
                       i64(book) * V_ENTRIES * HEAD_DIM;
  outputs::Entries own;
  own.read(entries, 0);
  ptx::wait_for_previous();
  if (tokens.total == 0) return;
  outputs::Shared memory(shared);
  const int packed = tokens.with_pages(splits), exact = tokens.with_exact(splits);
  states += i64(tile) * splits * STATE_FLOATS;
  memory.find_factors(states, packed, exact);
  __syncthreads();
  const u16* weights = reinterpret_cast<const u16*>(histograms) +
                       (i64(tile) * V_STAGES + book) * splits * V_ENTRIES * HEADS;
  memory.merge_weights(weights, packed);
  __syncthreads();
  float* all = partials + i64(tile) * V_STAGES * HEADS * HEAD_DIM;
  memory.multiply(own, entries, all + book * HEADS * HEAD_DIM);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) ticket = atomicAdd(arrivals + tile, 1);
  __syncthreads();
  if (ticket != V_STAGES - 1) return;
  __threadfence();
  const int tiles = (group + HEADS - 1) / HEADS, first = tile % tiles * HEADS;
  memory.finish(all, states, exact, int(hadamard), out + (i64(tile / tiles) * group + first) * QUARTERS,
                min(HEADS, group - first));
  if (threadIdx.x == 0) arrivals[tile] = 0;
}
