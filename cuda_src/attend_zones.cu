// Decode attention over zones: one query token over the blocks and the exact tail of one layer, split among CTAs.
//
// A grid of (CTAs, tiles of 8 query heads of a group). The work of a head is a list of units: blocks, then up to 64
// rows of the tail each. CTAs are shared out among the heads by how many units these have, which is known on the device
// alone: the launch is the same for all lengths. A CTA has TEAMS teams of four warps. Each takes a unit at a time,
// which is copied whole into its part of shared memory. The last CTA of a head to begin merges what the others send.
//
// Compiled with -D: HEAD_DIM, HEADS (4 or 8: the query heads of a CTA, rounded up), TEAMS, SHARED_BYTES.
#include "zone_unit.cuh"

static constexpr int THREADS = TEAMS * TEAM, WARPS = THREADS / WARP;
static constexpr int STATE_FLOATS = THREADS * 4 * HEADS + 3 * TEAMS * HEADS;  // of all threads and teams, at the end
static constexpr int UNITS_BYTES = TEAMS * UNIT_BYTES > STATE_FLOATS * 4 ? TEAMS * UNIT_BYTES : STATE_FLOATS * 4;
static constexpr int QUERY_BYTES = HEAD_DIM * HEADS * 4;
static_assert(HEADS == 4 || HEADS == 8, "heads are read four at a time");
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "HEAD_DIM: a multiple of 16 up to 256");
static_assert(UNITS_BYTES % 16 == 0 && sizeof(TeamSpace) % 16 == 0, "copies are of 16 bytes");
static_assert(QUERY_BYTES + TEAMS * sizeof(TeamSpace) + UNITS_BYTES == SHARED_BYTES, "cuda_zones.py counts otherwise");

// The units of the head that this CTA works for, `count` CTAs together, of which it is number `index`.
struct Share {
  int head = 0, index = 0, count = 0, first = 0;  // first: CTA of the head
  int blocks = 0, units = 0;                      // units: blocks, then parts of the tail
  i64 start = 0;                                  // of its blocks in the directory

  // Heads h have starts[h + 1] - starts[h] blocks (none where it is nullptr), and `tails` units of the tail. Each that
  // has any gets a CTA, others by how many it has: in all no more than there are, if there are as many as heads.
  KVRT_INLINE Share(const i64* starts, int tails, int heads) {
    const int lane = threadIdx.x % WARP, ctas = gridDim.x;
    const int all = (starts ? int(ptx::load_early(starts + heads)) : 0) + heads * tails;
    int taken = 0;
    for (int chunk = 0; chunk < heads; chunk += WARP) {
      const int h = chunk + lane;
      i64 begin = 0;
      int mine = 0, own = 0;  // blocks, CTAs
      if (h < heads) {
        if (starts) {
          begin = ptx::load_early(starts + h);
          mine = int(ptx::load_early(starts + h + 1) - begin);
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
      index = blockIdx.x - first;
      units = blocks + tails;
      start = starts ? starts[head] : 0;
      break;
    }
  }
  KVRT_INLINE int begin() const { return u32(index) * u32(units) / u32(count); }
  KVRT_INLINE int end() const { return u32(index + 1) * u32(units) / u32(count); }
};

// out (heads, HEAD_DIM) f32 = attention of q (heads, HEAD_DIM) f32, after RoPE, over the zones and the tail of a layer.
//
// layer: settings (VIEW_LAYER_SETTINGS,); lengths: of an extent, of which the tail's is read; scale is that of the
// softmax times log2(e); group: query heads a KV head. partials (gridDim.y * gridDim.x * 8 * (HEAD_DIM + 2),) f32 and
// arrivals (gridDim.y * KV heads,), zeros before and after, are scratch. Nothing is written for a head without tokens.
//
// Settings, lengths, directory and blocks are read before the kernel ahead has ended: no kernel of a step writes them.
extern "C" __global__ void __launch_bounds__(TEAMS * 128, 1)
attend_zones(const float* q, const i64* layer, const i64* lengths, float scale, int group, float4* partials,
             int* arrivals, float4* out) {
  KVRT_DYNAMIC_SHARED(shared);
  __shared__ int ticket;
  ptx::let_next_start();
  float* query = reinterpret_cast<float*>(shared);  // (HEAD_DIM, HEADS)
  TeamSpace* spaces = reinterpret_cast<TeamSpace*>(shared + QUERY_BYTES);
  u8* buffers = shared + QUERY_BYTES + TEAMS * sizeof(TeamSpace);
  const int team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM, warp = threadIdx.x / WARP, lane = thread % WARP;
  TeamSpace& space = spaces[team];
  u8* buffer = buffers + team * UNIT_BYTES;
  const int kv_heads = int(ptx::load_early(layer + VIEW_HEADS)), tail = int(ptx::load_early(lengths + 2));
  const i64* directory = reinterpret_cast<const i64*>(ptx::load_early(layer + VIEW_ZONE_UNITS));
  const i64* starts = reinterpret_cast<const i64*>(ptx::load_early(layer + VIEW_ZONE_STARTS));
  const Share share(directory ? starts : nullptr, (tail + BLOCK_TOKENS - 1) / BLOCK_TOKENS, kv_heads);
  if (share.count == 0) {
    ptx::wait_for_previous();
    return;
  }
  const int begin = share.begin(), end = share.end();

  const auto block_of = [&](int unit) {
    const i64* row = directory + 4 * (share.start + unit);
    const i64 run = ptx::load_early(row), channels = ptx::load_early(row + 1);
    return ZoneBlock(run, channels, ptx::load_early(row + 2), ptx::load_early(row + 3));
  };
  const auto rows_of = [&](int unit) { return min(tail - (unit - share.blocks) * BLOCK_TOKENS, BLOCK_TOKENS); };
  const auto fetch_rows = [&](int unit) {
    // Settings are read anew, from the nearest cache, so that they take no registers.
    const i64 keys = ptx::load_early(layer + VIEW_TAIL_KEYS), values = ptx::load_early(layer + VIEW_TAIL_VALUES);
    const i64 row = share.head * ptx::load_early(layer + VIEW_TAIL_ROWS) + i64(unit - share.blocks) * BLOCK_TOKENS;
    Unit::fetch(buffer, reinterpret_cast<const u8*>(keys) + row * HEAD_DIM * 2,
                reinterpret_cast<const u8*>(values) + row * HEAD_DIM * 2, rows_of(unit), thread);
  };
  ZoneBlock block(0, 0, 0, 0);
  OwnChannels channels;
  const auto fetch_block = [&](int unit) {
    block = block_of(unit);
    Unit::fetch(buffer, block, thread);
    channels.read(block, thread);
  };
  if (begin + team < end && begin + team < share.blocks) fetch_block(begin + team);
  ptx::wait_for_previous();
  const int tile = blockIdx.y, heads = min(group - 8 * tile, HEADS);  // query heads of this CTA
  const i64 first_head = i64(share.head) * group + 8 * tile;
  int* arrived = arrivals + tile * kv_heads + share.head;
  int my_ticket = 0;
  if (threadIdx.x == 0) my_ticket = atomicAdd(arrived, 1);
  for (int i = threadIdx.x; i < HEADS * HEAD_DIM; i += THREADS) {
    const int h = i / HEAD_DIM, c = i % HEAD_DIM;
    query[c * HEADS + h] = h < heads ? q[(first_head + h) * HEAD_DIM + c] * scale : 0.0f;
  }

  TeamSoftmax softmax;
  float sums[HEADS][4] = {};
  for (int round = begin; round < end; round += TEAMS) {
    const int index = round + team;
    const bool active = index < end, packed = active && index < share.blocks, exact = active && !packed;
    if (packed && round > begin) fetch_block(index);
    if (exact) fetch_rows(index);
    ptx::commit_copies();
    ptx::wait_copies<0>();
    __syncthreads();
    Unit unit{buffer, space, thread};
    if (packed) unit.fold_query(block, channels, query);
    __syncthreads();
    if (packed) unit.score(block);
    if (exact) unit.score(query, rows_of(index));
    __syncthreads();
    if (packed)
      softmax.step(space, thread / WARP, TEAM_WARPS, true, block.tokens.total(), block.tokens.of(0),
                   reinterpret_cast<const u32*>(buffer + block.value_meta(HEAD_DIM)));
    if (exact) softmax.step(space, thread / WARP, 2, false, rows_of(index), BLOCK_TOKENS, nullptr);
    __syncthreads();
    if (packed) unit.add_values(sums, block.tokens, buffer);
    if (exact) unit.add_values(sums, Counts(rows_of(index)), buffer + EXACT_VALUES);
    __syncthreads();  // the unit has been read
  }

  // The teams become one state, the CTAs of a head one result, in the CTA that was the last to begin.
  float* stats = reinterpret_cast<float*>(buffers);     // (TEAMS, HEADS, 3)
  float* parts = stats + 3 * TEAMS * HEADS;             // (HEADS, TEAMS * VALUE_PARTS, HEAD_DIM)
  constexpr int COUNT = TEAMS * VALUE_PARTS;
#pragma unroll
  for (int n = 0; n < TeamSoftmax::EACH; ++n) {
    const float total = warp_sum(softmax.total[n]), minimum = warp_sum(softmax.minimum[n]);
    float* mine = stats + 3 * (team * HEADS + thread / WARP + n * TEAM_WARPS);
    if (lane == 0) {
      mine[0] = softmax.peak[n];
      mine[1] = total;
      mine[2] = minimum;
    }
  }
  if (threadIdx.x == 0) ticket = my_ticket;
  if (thread < VALUE_QUADS * VALUE_PARTS)
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
      *reinterpret_cast<float4*>(parts + (h * COUNT + team * VALUE_PARTS + thread / VALUE_QUADS) * HEAD_DIM +
                                 thread % VALUE_QUADS * 4) = {sums[h][0], sums[h][1], sums[h][2], sums[h][3]};
  __syncthreads();
  const bool last = ticket == share.count - 1;
  float* all_sums = reinterpret_cast<float*>(partials) + (i64(tile) * gridDim.x + share.first) * 8 * HEAD_DIM;
  float* all_stats = reinterpret_cast<float*>(partials) + i64(gridDim.y) * gridDim.x * 8 * HEAD_DIM +
                     (i64(tile) * gridDim.x + share.first) * 16;
#pragma unroll
  for (int n = 0; n < (HEADS + WARPS - 1) / WARPS; ++n) {
    const int h = warp + n * WARPS;
    if (h >= heads) break;
    HeadState mine;
    const float* own = stats + 3 * (lane * HEADS + h);  // of team `lane`
    const bool is_team = lane < TEAMS;
    const auto at = [&](int part) { return reinterpret_cast<const float4*>(parts + (h * COUNT + part) * HEAD_DIM); };
    const float weight = mine.take(is_team ? own[0] : NOTHING, is_team ? own[1] : 0.0f);
    const float minimum = warp_sum(is_team ? weight * own[2] : 0.0f);
#pragma unroll
    for (int t = 0; t < TEAMS; ++t) {
      const float factor = __shfl_sync(ALL_LANES, weight, t);
#pragma unroll
      for (int i = 0; i < PARTS; ++i)
        if (lane + WARP * i < QUARTERS)
          for (int p = 0; p < VALUE_PARTS; ++p)
            mine.add(i, at(t * VALUE_PARTS + p)[lane + WARP * i], factor);
    }
#pragma unroll
    for (int i = 0; i < PARTS; ++i) mine.add(i, {minimum, minimum, minimum, minimum}, 1.0f);
    if (!last) {
      send(mine, all_sums + (share.index * 8 + h) * HEAD_DIM, all_stats + (share.index * 8 + h) * 2);
      continue;
    }
    HeadState merged;
    receive(merged, mine, share.index, all_sums + h * HEAD_DIM, all_stats + 2 * h, share.count);
    unrotate(merged, int(layer[VIEW_VALUE_HADAMARD]));
    const float factor = 1.0f / merged.total;
#pragma unroll
    for (int i = 0; i < PARTS; ++i)
      if (lane + WARP * i < QUARTERS) {
        const float4& x = merged.sums[i];
        out[(first_head + h) * QUARTERS + lane + WARP * i] = {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
      }
  }
  if (last && threadIdx.x == 0) *arrived = 0;
}
