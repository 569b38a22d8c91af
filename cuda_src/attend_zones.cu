// Decode attention over zones: one query token over the blocks and the exact tail of one layer, split among CTAs.
//
// A grid of (CTAs, tiles of 8 query heads of a group). The work of a head is a list of units: blocks, then up to 32
// rows of the tail each. CTAs are shared out among the heads by how many units these have, which is known on the device
// alone: the launch is the same for all lengths. A CTA has TEAMS teams of two warps. Each takes a unit at a time,
// which is copied whole into shared memory: all units of a CTA at once, where they find room. The last CTA of a head to
// begin merges what the others send.
//
// Compiled with -D: HEAD_DIM, HEADS (4 or 8: the query heads of a CTA, rounded up), TEAMS, ARENA_BYTES (of what units
// are copied to), SHARED_BYTES.
#include "zone_softmax.cuh"

static constexpr int THREADS = TEAMS * TEAM, WARPS = THREADS / WARP;
// What warps have found is put where units were. Heads are 8 words apart in the banks: they are written at once.
static constexpr int HEAD_PITCH = WARPS * HEAD_DIM + 8;
static constexpr int STATE_FLOATS = HEADS * HEAD_PITCH + 3 * WARPS * HEADS;
static_assert(HEADS == 4 || HEADS == 8, "heads are four, or twice as many");
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "HEAD_DIM: a multiple of 16 up to 256");
static_assert(TEAMS < 16, "a barrier for each team");
static_assert(ARENA_BYTES >= BLOCK_BYTES && ARENA_BYTES >= STATE_FLOATS * 4 && ARENA_BYTES % 16 == 0,
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
  int head, blocks;          // blocks: units that are none of the tail
  int tile, queries;         // of query heads, and how many of them there are in it
  int begin, end;            // its units
  int number, count, first;  // of the CTAs of its head; first: which of the grid is number 0
  int cell, teams, depth;    // bytes and use of the cells of `lay_out`

  // Heads h have starts[h + 1] - starts[h] blocks (none where it is nullptr), and `tails` units of the tail. Each that
  // has any gets a CTA, others by how many it has: in all no more than there are, if there are as many as heads. Those
  // that are left over get no units.
  KVRT_INLINE void find(const i64* units, const i64* starts, int tails, int heads) {
    const int lane = threadIdx.x % WARP, ctas = gridDim.x;
    const int all = (starts ? int(ptx::load_early(starts + heads)) : 0) + heads * tails;
    int taken = 0;
    begin = end = 0;
    for (int chunk = 0; chunk < heads; chunk += WARP) {
      const int h = chunk + lane;
      i64 start = 0;
      int mine = 0, own = 0;  // blocks, CTAs
      if (h < heads) {
        if (starts) {
          start = ptx::load_early(starts + h);
          mine = int(ptx::load_early(starts + h + 1) - start);
        }
        const int wanted = mine + tails;
        if (wanted) own = min(wanted, 1 + int(u32(wanted) * u32(ctas - heads) / u32(all)));
      }
      int behind = own;  // own ones, and those of heads before
#pragma unroll
      for (int d = 1; d < WARP; d *= 2) {
        const int other = __shfl_sync(ALL_LANES, behind, lane < d ? lane : lane - d);
        if (lane >= d) behind += other;
      }
      behind += taken;
      taken = __shfl_sync(ALL_LANES, behind, WARP - 1);
      const bool here = int(blockIdx.x) < behind && int(blockIdx.x) >= behind - own;
      const u32 found = __ballot_sync(ALL_LANES, here);
      if (!found) continue;
      const int from = __ffs(found) - 1;
      head = chunk + from;
      count = __shfl_sync(ALL_LANES, own, from);
      first = __shfl_sync(ALL_LANES, behind, from) - count;
      blocks = __shfl_sync(ALL_LANES, mine, from);
      directory = units + 4 * i64(__shfl_sync(ALL_LANES, int(start), from));
      number = blockIdx.x - first;
      const u32 share = blocks + tails;
      begin = number * share / u32(count);
      end = (number + 1) * share / u32(count);
      break;
    }
  }

  // Divide the arena into cells of the size of the largest unit, one or two a team: with two, it reads one while
  // another is copied.
  KVRT_INLINE void lay_out() {
    u32 largest = end > blocks ? EXACT_BYTES : 0;
    for (int unit = begin + int(threadIdx.x) % WARP; unit < min(end, blocks); unit += WARP)
      largest = max(largest, u32(block(unit).bytes(HEAD_DIM)));
    cell = int(__reduce_max_sync(ALL_LANES, largest));
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
  KVRT_INLINE int rows(int unit, const i64* lengths) const {
    return min(int(ptx::load_early(lengths + 2)) - (unit - blocks) * EXACT_ROWS, EXACT_ROWS);
  }

  // What of a unit is wanted before its bytes, if it is a block.
  KVRT_INLINE void describe(ZoneBlock& of, OwnChannels& channels, int unit, int thread) const {
    if (unit >= min(end, blocks)) return;
    of = block(unit);
    channels.read(of, thread);
  }
  // Begin to copy a unit, if it is one of the CTA's.
  KVRT_INLINE void fetch(u8* to, int unit, const i64* layer, const i64* lengths, int thread) const {
    if (unit < min(end, blocks)) {
      const ZoneBlock wanted = block(unit);
      Unit::fetch(to, wanted, thread);
      OwnChannels().read(wanted, thread);  // so that they are near when they are wanted
    } else if (unit < end) {
      ptx::wait_for_previous();  // the newest row is from the kernel before
      const i64 keys = ptx::load_early(layer + VIEW_TAIL_KEYS), values = ptx::load_early(layer + VIEW_TAIL_VALUES);
      const i64 row = head * ptx::load_early(layer + VIEW_TAIL_ROWS) + (unit - blocks) * EXACT_ROWS;
      Unit::fetch(to, reinterpret_cast<const u8*>(keys) + row * HEAD_DIM * 2,
                  reinterpret_cast<const u8*>(values) + row * HEAD_DIM * 2, rows(unit, lengths), thread);
    }
    ptx::commit_copies();
  }
};

// out (heads, HEAD_DIM) f32 = attention of q (heads, HEAD_DIM) f32, after RoPE, over the zones and the tail of a layer.
//
// layer: settings (VIEW_LAYER_SETTINGS,); lengths: of an extent, of which the tail's is read; scale is that of the
// softmax times log2(e); group: query heads a KV head. partials (gridDim.y * gridDim.x * 8 * (HEAD_DIM + 2),) f32 and
// arrivals (gridDim.y * KV heads,), zeros before and after, are scratch. Nothing is written for a head without tokens.
//
// Settings, lengths, directory and blocks are read before the kernel ahead has ended: no kernel of a step writes them.
extern "C" __global__ void __launch_bounds__(TEAMS * 64, 1)
attend_zones(const float4* q, const i64* layer, const i64* lengths, float scale, int group, float4* partials,
             int* arrivals, float4* out) {
  KVRT_DYNAMIC_SHARED(shared);
  __shared__ Task task;
  __shared__ int ticket;
  ptx::let_next_start();
  u8* arena = shared;
  TeamSpace* spaces = reinterpret_cast<TeamSpace*>(shared + ARENA_BYTES);
  Query& query = *reinterpret_cast<Query*>(spaces + TEAMS);
  const int team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM, warp = threadIdx.x / WARP, lane = thread % WARP;
  const int kv_heads = int(ptx::load_early(layer + VIEW_HEADS)), tail = int(ptx::load_early(lengths + 2));
  ZoneBlock block(0, 0, 0, 0);
  OwnChannels channels;
  {
    const i64* units = reinterpret_cast<const i64*>(ptx::load_early(layer + VIEW_ZONE_UNITS));
    const i64* starts = reinterpret_cast<const i64*>(ptx::load_early(layer + VIEW_ZONE_STARTS));
    Task mine;
    mine.find(units, units ? starts : nullptr, (tail + EXACT_ROWS - 1) / EXACT_ROWS, kv_heads);
    if (mine.begin == mine.end) {
      ptx::wait_for_previous();
      return;
    }
    mine.tile = blockIdx.y;
    mine.queries = min(group - 8 * mine.tile, HEADS);
    mine.lay_out();
    if (team < mine.teams) {
#pragma unroll 1
      for (int i = 0, at = team; i < mine.depth; ++i, at += mine.teams)
        mine.fetch(arena + at * mine.cell, mine.begin + at, layer, lengths, thread);
      mine.describe(block, channels, mine.begin + team, thread);
    }
    ptx::wait_for_previous();
    int my_ticket = 0;
    if (threadIdx.x == 0) {
      my_ticket = atomicAdd(arrivals + mine.tile * kv_heads + mine.head, 1);
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
    u8* const here = arena + (team + (task.depth > 1 ? turn % 2 * task.teams : 0)) * task.cell;
    const bool packed = index < task.blocks;
    if (task.depth > 1)
      ptx::wait_copies<1>();
    else
      ptx::wait_copies<0>();
    ptx::sync_threads(1 + team, TEAM);

    Unit unit{here, space, thread};
    const Counts counts = packed ? block.tokens : Counts(task.rows(index, lengths));
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
      task.fetch(here, index + task.depth * task.teams, layer, lengths, thread);
      task.describe(block, channels, index + task.teams, thread);
    }
  }
  __syncthreads();  // units have been read

  // The warps become one state, the CTAs of a head one result, in the CTA that was the last to begin.
  float* stats = reinterpret_cast<float*>(arena);  // (WARPS, HEADS, 3)
  float* parts = stats + 3 * WARPS * HEADS;        // (HEADS, WARPS, HEAD_DIM), HEAD_PITCH for a head
  const int states = task.teams * TEAM_WARPS;
  if (warp < states) softmax.write(stats + 3 * warp * HEADS, parts + warp * HEAD_DIM, HEAD_PITCH);
  __syncthreads();
  const bool last = ticket == task.count - 1;
  float* all_sums = reinterpret_cast<float*>(partials) + (i64(task.tile) * gridDim.x + task.first) * 8 * HEAD_DIM;
  float* all_stats = reinterpret_cast<float*>(partials) + i64(gridDim.y) * gridDim.x * 8 * HEAD_DIM +
                     (i64(task.tile) * gridDim.x + task.first) * 16;
  const i64 first_head = i64(task.head) * group + 8 * task.tile;
  for (int h = warp; h < task.queries; h += WARPS) {
    HeadState mine;
    const float* own = stats + 3 * (lane * HEADS + h);  // of warp `lane`
    const bool is_state = lane < states;
    const float weight = mine.take(is_state ? own[0] : NOTHING, is_state ? own[1] : 0.0f);
    const float minimum = warp_sum(is_state ? weight * own[2] : 0.0f);
    for (int w = 0; w < states; ++w) {
      const float factor = __shfl_sync(ALL_LANES, weight, w);
#pragma unroll
      for (int i = 0; i < PARTS; ++i)
        if (lane + WARP * i < QUARTERS)
          mine.add(i, reinterpret_cast<const float4*>(parts + h * HEAD_PITCH + w * HEAD_DIM)[lane + WARP * i], factor);
    }
#pragma unroll
    for (int i = 0; i < PARTS; ++i) mine.add(i, {minimum, minimum, minimum, minimum}, 1.0f);
    if (!last) {
      send(mine, all_sums + (task.number * 8 + h) * HEAD_DIM, all_stats + (task.number * 8 + h) * 2);
      continue;
    }
    HeadState merged;
    receive<12>(merged, mine, task.number, all_sums + h * HEAD_DIM, all_stats + 2 * h, task.count);
    const float factor = 1.0f / merged.total;
    // Through the head's own part of shared memory into the order of channels.
    float* natural = parts + h * HEAD_PITCH;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PARTS; ++i)
      if (lane + WARP * i < QUARTERS) {
        const float4& x = merged.sums[i];
        float2* to = reinterpret_cast<float2*>(natural);
        const int pair = 2 * (lane + WARP * i);
        to[Softmax::pair_at(pair)] = {x.x * factor, x.y * factor};
        to[Softmax::pair_at(pair + 1)] = {x.z * factor, x.w * factor};
      }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PARTS; ++i)
      if (lane + WARP * i < QUARTERS) merged.sums[i] = reinterpret_cast<const float4*>(natural)[lane + WARP * i];
    unrotate(merged, int(ptx::load_early(layer + VIEW_VALUE_HADAMARD)));
#pragma unroll
    for (int i = 0; i < PARTS; ++i)
      if (lane + WARP * i < QUARTERS) out[(first_head + h) * QUARTERS + lane + WARP * i] = merged.sums[i];
  }
  if (last && threadIdx.x == 0) arrivals[task.tile * int(ptx::load_early(layer + VIEW_HEADS)) + task.head] = 0;
}
