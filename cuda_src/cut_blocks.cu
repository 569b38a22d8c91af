// From the widths of tokens to blocks: which tokens each has, in its order, and how many of each width. See
// kvrt/trizone/blocks.py.
#include "zone_block.cuh"

static constexpr int THREADS = 1024, WARPS = THREADS / WARP;
static constexpr int ROUNDS = 4;  // of THREADS tokens that are looked at together
static constexpr int LANE_BITS = 16;

// chosen (heads, n): 0 for a token that is not kept, else an index, of which bits 4 * index and up of `ranks` are the
// place in a block; tokens (heads, n) i64 = the kept ones of a head by block, then rank, then position, counted from
// `start`; counts (heads, units, 4) u8 = those of each block by rank, and zeros behind the last block. Grid (heads).
extern "C" __global__ void __launch_bounds__(1024)
cut_blocks(const u8* chosen, i64 n, i64 ranks, i64 start, i64* tokens, u32* counts, i64 units) {
  __shared__ i64 found[WARPS];
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const u32 before_lane = (1u << lane) - 1;
  chosen += blockIdx.x * n;
  tokens += blockIdx.x * n;
  counts += blockIdx.x * units;

  // Kept tokens by position. Counts of the rounds lie side by side in one number.
  i64 kept = 0;
  for (i64 first = 0; first < n; first += ROUNDS * THREADS) {
    u32 masks[ROUNDS];
    bool keeps[ROUNDS];
    i64 mine = 0;
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const i64 token = first + i * THREADS + threadIdx.x;
      keeps[i] = token < n && chosen[token] > 0;
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      masks[i] = __ballot_sync(ALL_LANES, keeps[i]);
      mine |= i64(__popc(masks[i])) << i * LANE_BITS;
    }
    __syncthreads();
    if (lane == 0) found[warp] = mine;
    __syncthreads();
    i64 before = 0, total = 0;
    for (int w = 0; w < WARPS; ++w) {
      before += w < warp ? found[w] : 0;
      total += found[w];
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int place = int(before >> i * LANE_BITS & 0xFFFF) + __popc(masks[i] & before_lane);
      if (keeps[i]) tokens[kept + place] = first + i * THREADS + threadIdx.x;
      kept += total >> i * LANE_BITS & 0xFFFF;
    }
  }
  __syncthreads();

  // Each block by rank; a warp has two tokens a lane.
  for (i64 unit = warp; unit < units; unit += WARPS) {
    i64* own = tokens + unit * BLOCK_TOKENS;
    i64 token[2];
    int rank[2];
    u32 masks[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = half * WARP + lane;
      const bool exists = unit * BLOCK_TOKENS + place < kept;
      token[half] = exists ? own[place] : 0;
      rank[half] = exists ? int(ranks >> 4 * chosen[token[half]] & 15) : -1;
#pragma unroll
      for (int r = 0; r < 4; ++r) masks[half][r] = __ballot_sync(ALL_LANES, rank[half] == r);
    }
    __syncwarp();
    int first = 0;
    u32 sizes = 0;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int in_first = __popc(masks[0][r]), size = in_first + __popc(masks[1][r]);
      if (rank[0] == r) own[first + __popc(masks[0][r] & before_lane)] = start + token[0];
      if (rank[1] == r) own[first + in_first + __popc(masks[1][r] & before_lane)] = start + token[1];
      first += size;
      sizes |= u32(size) << 8 * r;
    }
    if (lane == 0) counts[unit] = sizes;
  }
}
