// Decode attention over zones: one query token over the blocks and the exact tail of one layer, split among CTAs.
//
// A grid of (CTAs, tiles of 8 query heads of a group). The work of a head is a list of units: blocks, then up to 32
// rows of the tail each. CTAs are shared out among the heads by how many units these have, which is known on the device
// alone: the launch is the same for all lengths. A CTA has TEAMS teams of two warps. Each takes a unit at a time,
// which is copied whole into shared memory: all units of a CTA at once, where they find room. The last CTA of a head to
// begin merges what all send.
//
// Compiled with -D: HEAD_DIM, HEADS (4 or 8: the query heads of a CTA, rounded up), TEAMS, ARENA_BYTES (of what units
// are copied to), SHARED_BYTES.
static constexpr int WARPS = 2 * TEAMS;

#include "zone_merge.cuh"

static_assert(WARPS == TEAMS * TEAM_WARPS, "a team has two warps");
static_assert(HEADS == 4 || HEADS == 8, "heads are four, or twice as many");
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "HEAD_DIM: a multiple of 16 up to 256");
static_assert(TEAMS < 16, "a barrier for each team");
static_assert(ARENA_BYTES >= BLOCK_BYTES && ARENA_BYTES >= Found::FLOATS * 4 && ARENA_BYTES % 16 == 0,
              "room for a unit, and for what warps have found");
// What is read behind the last line of a block is still shared memory: see `add_lines`.
static_assert(sizeof(TeamSpace) >= 15 * HEAD_DIM + 2 * CHUNK, "room for rows behind the last");
static_assert(sizeof(TeamSpace) % 16 == 0, "rows of weights are read 16 bytes at a time");
static_assert(ARENA_BYTES + TEAMS * sizeof(TeamSpace) + sizeof(Query) == SHARED_BYTES,
              "cuda_zones.py counts otherwise");

// What a CTA does: some units of one head. All threads know it at first, and read it from shared memory afterwards: it
// would take registers.
struct Task {
  const i64* directory;      // of the head
  int head, blocks, tail;    // blocks: units that are none of the tail; tail: its rows
  int tile, queries;         // of query heads, and how many of them there are in it
  int begin, end;            // its units
  int number, count, first;  // of the CTAs of its head; first: which of the grid is number 0
  int cell, teams, depth;    // bytes that hold any of its units; use of the cells of `lay_out`
  int kv_heads, hadamard;    // of the layer

  // Each head gets a CTA, and a share of those left over by how many units it has; those beyond its units do nothing.
  // Products of floats do for that: all CTAs find the same ones, and not more than there are.
  KVRT_INLINE void find(const i64* layer, const i64* lengths) {
    // What is read at first depends on nothing that is read: one trip to the memory.
    const i64 heads = ptx::load_early(layer + VIEW_HEADS), rows = ptx::load_early(lengths + 2);
    const i64 units = ptx::load_early(layer + VIEW_ZONE_UNITS), of_all = ptx::load_early(layer + VIEW_ZONE_BLOCKS);
    const i64 largest = ptx::load_early(layer + VIEW_ZONE_LARGEST);
    const i64 transform = ptx::load_early(layer + VIEW_VALUE_HADAMARD);
    int chunk = 0;
    begin = end = blocks = 0;
    do {
      const int h = chunk + threadIdx.x % WARP;
      const i64* starts = layer + VIEW_LAYER_SETTINGS + h;
      const int start = int(ptx::load_early(starts)), next = int(ptx::load_early(starts + 1));
      kv_heads = int(heads);
      tail = int(rows);
      const int tails = (tail + EXACT_ROWS - 1) / EXACT_ROWS;
      const float share = float(int(gridDim.x) - kv_heads) / float(max(int(of_all) + kv_heads * tails, 1));
      const int from_here = h + int(float(start + h * tails) * share);
      const int behind = h + 1 + int(float(next + (h + 1) * tails) * share);
      const int cta = blockIdx.x;
      const u32 found = __ballot_sync(ALL_LANES, cta >= from_here && cta < behind && h < kv_heads);
      if (!found) continue;
      const int from = __ffs(found) - 1;
      head = chunk + from;
      first = __shfl_sync(ALL_LANES, from_here, from);
      blocks = __shfl_sync(ALL_LANES, next - start, from);
      count = min(__shfl_sync(ALL_LANES, behind, from) - first, blocks + tails);
      directory = reinterpret_cast<const i64*>(units) + 4 * i64(__shfl_sync(ALL_LANES, start, from));
      number = cta - first;
      if (number >= count) break;
      const float each = float(blocks + tails) / float(count);
      begin = int(float(number) * each);
      end = number + 1 == count ? blocks + tails : int(float(number + 1) * each);
      break;
    } while ((chunk += WARP) < kv_heads);
    hadamard = int(transform);
    cell = max(int(largest), end > blocks ? EXACT_BYTES : 0);
  }

  // Divide the arena into cells that hold any unit, one or two a team: with two, it reads one while another is copied.
  KVRT_INLINE void lay_out() {
    const int cells = ARENA_BYTES / cell;
    teams = min(min(cells, TEAMS), end - begin);
    depth = cells >= 2 * teams ? 2 : 1;
  }

  KVRT_INLINE ZoneBlock block(int unit) const {
    const i64* row = directory + 4 * unit;
    const i64 run = ptx::load_early(row), channels = ptx::load_early(row + 1);
    return ZoneBlock(run, channels, ptx::load_early(row + 2), ptx::load_early(row + 3));
  }
  // The exact rows of a unit of the tail.
  KVRT_INLINE int rows(int unit) const { return min(tail - (unit - blocks) * EXACT_ROWS, EXACT_ROWS); }

  // What of a unit is wanted before its bytes, if it is a block.
  KVRT_INLINE void describe(ZoneBlock& of, OwnChannels& channels, int unit, int thread) const {
    if (unit >= min(end, blocks)) return;
    of = block(unit);
    channels.read(of, thread);
  }
  // Begin to copy a unit, if it is one of the CTA's. `arrival` is the barrier of the cell.
  KVRT_INLINE void fetch(u8* to, u64* arrival, int unit, const i64* layer, int thread) const {
    if (unit < min(end, blocks)) {
#if KVRT_BULK_COPIES
      if (thread == 0) Unit::fetch(to, arrival, block(unit));
      return;
#else
      Unit::fetch(to, block(unit), thread);
#endif
    } else if (unit < end) {
      ptx::wait_for_previous();  // the newest row is from the kernel before
      const i64 keys = ptx::load_early(layer + VIEW_TAIL_KEYS), values = ptx::load_early(layer + VIEW_TAIL_VALUES);
      const i64 row = head * ptx::load_early(layer + VIEW_TAIL_ROWS) + (unit - blocks) * EXACT_ROWS;
      Unit::fetch(to, reinterpret_cast<const u8*>(keys) + row * HEAD_DIM * 2,
                  reinterpret_cast<const u8*>(values) + row * HEAD_DIM * 2, rows(unit), thread);
    }
    ptx::commit_copies();
  }
};

// out (heads, HEAD_DIM) f32 = attention of q (heads, HEAD_DIM) f32, after RoPE, over the zones and the tail of a layer.
//
// layer: settings (VIEW_LAYER_SETTINGS,), and behind them where heads' blocks begin; lengths: of an extent, of which
// the tail's is read; scale is that of the softmax times log2(e); group: query heads a KV head. partials (gridDim.y *
// gridDim.x * 8 * (HEAD_DIM + 4),) f32 and arrivals (gridDim.y * KV heads,), zeros before and after, are scratch.
// Nothing is written for a head without tokens.
//
// Settings, lengths, directory and blocks are read before the kernel ahead has ended: no kernel of a step writes them.
extern "C" __global__ void __launch_bounds__(TEAMS * 64, 1)
attend_zones(const float4* q, const i64* layer, const i64* lengths, float scale, int group, float4* partials,
             int* arrivals, float4* out) {
  KVRT_DYNAMIC_SHARED(shared);
  __shared__ Task task;
  __shared__ int ticket;
  __shared__ u64 barriers[TEAMS][2];  // of a team's cells
  ptx::let_next_start();
  u8* arena = shared;
  TeamSpace* spaces = reinterpret_cast<TeamSpace*>(shared + ARENA_BYTES);
  Query& query = *reinterpret_cast<Query*>(spaces + TEAMS);
  const int team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM, warp = threadIdx.x / WARP, lane = thread % WARP;
  ZoneBlock block(0, 0, 0, 0);
  OwnChannels channels;
  {
    Task mine;
    mine.find(layer, lengths);
    if (mine.begin == mine.end) {
      ptx::wait_for_previous();
      return;
    }
    mine.tile = blockIdx.y;
    mine.queries = min(group - 8 * mine.tile, HEADS);
    mine.lay_out();
#if KVRT_BULK_COPIES
    if (thread == 0) {
      ptx::barrier_init(&barriers[team][0]);
      ptx::barrier_init(&barriers[team][1]);
      ptx::barriers_are_made();
    }
#endif
    if (team < mine.teams) {
#pragma unroll 1
      for (int i = 0, at = team; i < mine.depth; ++i, at += mine.teams)
        mine.fetch(arena + at * mine.cell, &barriers[team][i], mine.begin + at, layer, thread);
      mine.describe(block, channels, mine.begin + team, thread);
    }
    ptx::wait_for_previous();
    int my_ticket = 0;
    if (threadIdx.x == 0) {
      my_ticket = atomicAdd(arrivals + mine.tile * mine.kv_heads + mine.head, 1);
      task = mine;
    }
    const float4* own = q + (i64(mine.head) * group + 8 * mine.tile) * QUARTERS;
    for (int h = warp; h < HEADS; h += WARPS) query.read(h, h < mine.queries ? own + h * QUARTERS : nullptr, scale);
    if (threadIdx.x == 0) ticket = my_ticket;
  }
  spaces[team].query.clear_last(thread);
  spaces[team].weights[thread / WARP].clear_last(lane);
  __syncthreads();

  Softmax softmax;
  const int first = team < task.teams ? task.begin + team : task.end;
  for (int index = first, turn = 0; index < task.end; index += task.teams, ++turn) {
    const u32 self = ptx::as_new(threadIdx.x);
    const int team = self / TEAM, thread = self % TEAM;
    TeamSpace& space = spaces[team];
    const int half = task.depth > 1 ? turn % 2 : 0;
    u8* const here = arena + (team + half * task.teams) * task.cell;
    u64* const arrival = &barriers[team][half];
    const bool packed = index < task.blocks;
#if KVRT_BULK_COPIES
    if (packed) ptx::barrier_wait(arrival, (task.depth > 1 ? turn / 2 : turn) % 2);
#endif
    if (!KVRT_BULK_COPIES || !packed) {
      if (task.depth > 1)
        ptx::wait_copies<1>();
      else
        ptx::wait_copies<0>();
      ptx::sync_threads(1 + team, TEAM);
    }

    Unit unit{here, space, thread};
    const Counts counts = packed ? block.tokens : Counts(task.rows(index));
    const int own = thread / WARP * WARP_TOKENS;
    int exponent = 0;
    if (packed)
      exponent = unit.fold_query(block, channels, query);
    else
      unit.fold_query(query);
    ptx::sync_threads(1 + team, TEAM);
    if (own < counts.total()) {
      float scores[2][4];
      if (packed)
        unit.score(scores, block, own, exponent, query);
      else
        unit.score(scores, query);
      softmax.step(scores, counts, own, packed ? here : here + EXACT_VALUES, here + block.value_meta(HEAD_DIM),
                   space.weights[thread / WARP], thread % WARP);
    }
    if (index + task.teams < task.end) {
      ptx::sync_threads(1 + team, TEAM);  // the unit has been read
      task.fetch(here, arrival, index + task.depth * task.teams, layer, thread);
      task.describe(block, channels, index + task.teams, thread);
    }
  }
  __syncthreads();  // units have been read

  // The warps become one state, the CTAs of a head one result, in the CTA that was the last to begin.
  const Found found(arena);
  const int states = task.teams * TEAM_WARPS;
  if (warp < states) found.put(softmax, warp);
  __syncthreads();
  const bool last = ticket == task.count - 1;
  float* natural = &query.channels[0][0];  // (HEADS, HEAD_DIM): the query is no longer wanted
  const i64 cta = i64(task.tile) * gridDim.x + task.first;
  float* all_sums = reinterpret_cast<float*>(partials) + cta * 8 * HEAD_DIM;
  float2* all_stats =
      reinterpret_cast<float2*>(reinterpret_cast<float*>(partials) + i64(gridDim.y) * gridDim.x * 8 * HEAD_DIM) +
      cta * 8 * SPLIT;
  for (int item = warp; item < task.queries * SPLIT; item += WARPS) {
    const int h = item / SPLIT, from = item % SPLIT * PART_PAIRS;
    PartState mine;
    found.merge(mine, h, from, states);
    const Handed handed{all_sums + h * HEAD_DIM + 2 * from, all_stats + item, 8 * SPLIT,
                        PAIRS % PART_PAIRS ? min(PART_PAIRS, PAIRS - from) : PART_PAIRS};
    send(mine, handed.from(task.number));
    if (!last) continue;
    PartState whole;
    receive<AT_ONCE>(whole, handed, task.count);
    const float factor = 1.0f / whole.total;
#pragma unroll
    for (int i = 0; i < PART_PAIRS / WARP; ++i)
      if (handed.has(i)) {
        const float2& x = whole.sums[i];
        reinterpret_cast<float2*>(natural + h * HEAD_DIM)[from + lane + WARP * i] = {x.x * factor, x.y * factor};
      }
  }
  if (!last) return;
  __syncthreads();
  const i64 first_head = i64(task.head) * group + 8 * task.tile;
  for (int h = warp; h < task.queries; h += WARPS)
    finish(out + (first_head + h) * QUARTERS, reinterpret_cast<const float4*>(natural) + h * QUARTERS, task.hadamard);
  if (threadIdx.x == 0) arrivals[task.tile * task.kv_heads + task.head] = 0;
}
