// How much attention keys receive: exact softmax weights, summed over queries. No matrix of weights is kept.
//
// Scores are computed twice, by tensor cores: once for what each query's weights sum up to, chunk of keys by chunk, and
// once more for the weights, whose sums over the queries stay with the warps that own the keys. All sums have one
// order. Keys are the wide operand A of mma.m16n8k16, queries are N. One variant a -DHEAD_DIM (16..256 in steps of 16).
//
// q (n, kv_heads * group, HEAD_DIM) f32 are the queries of positions `position`, position + 1, ... among the keys (m,
// kv_heads, HEAD_DIM) f32; row i * group + g of a KV head is query head g of token i. `scale` is that of the softmax
// times log2(e). A chunk is `tiles` tiles of keys; chunks cover those that any query sees.
#include "common.cuh"

namespace {
constexpr int DIM = HEAD_DIM, STEPS = DIM / 16;
static_assert(DIM % 16 == 0 && DIM >= 16 && DIM <= 256, "HEAD_DIM: a multiple of 16 from 16 to 256");
constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int KEYS = 64, SLICES = KEYS / 16;  // a warp has one slice of a tile's keys ...
constexpr int ROWS = 128, HALF = ROWS / 2;    // ... and one half of the rows of queries
constexpr int COLUMNS = HALF / 8 * 2;         // that a thread has of these
constexpr int PITCH = DIM * 2 + 16;           // bytes from row to row: 8 rows meet all banks
constexpr int BLOCKS = DIM > 128 ? 1 : 2;     // that share a multiprocessor
constexpr float NOTHING = -1e30f;             // below any score, yet finite
constexpr float LARGEST_HALF = 65504.0f;

struct Shared {
  u8 queries[ROWS * PITCH], keys[KEYS * PITCH];
  int limits[ROWS];   // the last key that a row sees; -1 where there is no row
  float bases[ROWS];  // what its scores are taken against
  float2 stats[SLICES][ROWS];
  float sums[2][KEYS];
};

KVRT_INLINE float held(float x) { return x > LARGEST_HALF ? LARGEST_HALF : x < -LARGEST_HALF ? -LARGEST_HALF : x; }

// COUNT rows of halves from rows of floats; find(row) is where one begins, or nullptr for zeros.
template <int COUNT, class Find>
KVRT_INLINE void load_rows(u8* target, const Find& find) {
#pragma unroll
  for (int i = threadIdx.x; i < COUNT * DIM / 4; i += THREADS) {
    const int row = i / (DIM / 4), part = i % (DIM / 4);
    const float* from = find(row);
    float4 x = {0, 0, 0, 0};
    if (from) x = reinterpret_cast<const float4*>(from)[part];
    *reinterpret_cast<uint2*>(target + row * PITCH + part * 8) = {ptx::pack_half(held(x.x), held(x.y)),
                                                                  ptx::pack_half(held(x.z), held(x.w))};
  }
}

struct Problem {
  const float *q, *keys;
  int n, position, kv_heads, group, head;

  KVRT_INLINE int rows() const { return n * group; }
  KVRT_INLINE int seen() const { return position + n; }  // keys that any query sees
  KVRT_INLINE void load_queries(Shared& to, int first) const {
    load_rows<ROWS>(to.queries, [&](int r) -> const float* {
      const int row = first + r;
      if (row >= rows()) return nullptr;
      return q + ((i64(row / group) * kv_heads + head) * group + row % group) * DIM;
    });
    if (int(threadIdx.x) < ROWS) {
      const int row = first + threadIdx.x;
      to.limits[threadIdx.x] = row < rows() ? position + row / group : -1;
    }
  }
  KVRT_INLINE void load_keys(Shared& to, int first) const {
    load_rows<KEYS>(to.keys, [&](int t) -> const float* {
      return first + t < seen() ? keys + (i64(first + t) * kv_heads + head) * DIM : nullptr;
    });
  }
};

// take(column, scores) for all pairs of columns of the warp: scores[i] is of key lane / 4 + 8 (i / 2) of its slice, and
// of row 2 (lane % 4) + i % 2 + 8 column of its half.
template <class Take>
KVRT_INLINE void each_score(const Shared& from, const Take& take) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const u8* keys = from.keys + (warp % SLICES * 16 + lane % 16) * PITCH + lane / 16 * 16;
  const u8* queries = from.queries + (warp / SLICES * HALF + lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
  u32 a[STEPS][4];
#pragma unroll
  for (int s = 0; s < STEPS; ++s) ptx::load_matrix4(a[s], keys + s * 32);
#pragma unroll
  for (int pair = 0; pair < HALF / 16; ++pair) {
    float scores[2][4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      u32 b[4];
      ptx::load_matrix4(b, queries + pair * 16 * PITCH + s * 32);
      ptx::mma_half(scores[0], a[s][0], a[s][1], a[s][2], a[s][3], b[0], b[1]);
      ptx::mma_half(scores[1], a[s][0], a[s][1], a[s][2], a[s][3], b[2], b[3]);
    }
    take(2 * pair, scores[0]);
    take(2 * pair + 1, scores[1]);
  }
}

// Scores of keys that a row does not see become -infinity.
KVRT_INLINE void mask(float* scores, const Shared& from, int tile, int column) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const int* limits = from.limits + warp / SLICES * HALF + column * 8 + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (tile + warp % SLICES * 16 + lane / 4 + 8 * (i / 2) > limits[i % 2]) scores[i] = __uint_as_float(0xFF800000u);
}

// Maximum and sum of 2^(score - maximum) of two sets of scores become those of both.
KVRT_INLINE void unite(float& peak, float& total, float other_peak, float other_total) {
  const float top = fmaxf(peak, other_peak);
  total = total * ptx::exp2(peak - top) + other_total * ptx::exp2(other_peak - top);
  peak = top;
}
}  // namespace

// stats (kv_heads, rows, chunks) = maximum and sum of each row over a chunk's keys.
// Grid (chunks, kv_heads, rows / 128, up), 256 threads; sizeof(Shared) bytes of shared memory.
extern "C" __global__ void __launch_bounds__(256, BLOCKS)
received_stats(const float* q, const float* keys, int n, int position, int group, float scale, int tiles,
               float2* stats) {
  KVRT_DYNAMIC_SHARED(memory);
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const Problem problem{q, keys, n, position, int(gridDim.y), group, int(blockIdx.y)};
  const int first_row = blockIdx.z * ROWS;
  problem.load_queries(shared, first_row);
  float peaks[COLUMNS], totals[COLUMNS];
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
    peaks[i] = NOTHING;
    totals[i] = 0;
  }
  const int begin = blockIdx.x * tiles * KEYS, end = min(begin + tiles * KEYS, problem.seen());
  for (int tile = begin; tile < end; tile += KEYS) {
    __syncthreads();  // the tile before has been read
    problem.load_keys(shared, tile);
    __syncthreads();
    const bool masked = tile + KEYS > position;
    each_score(shared, [&](int column, float* scores) {
      if (masked) mask(scores, shared, tile, column);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low = scores[i] * scale, high = scores[2 + i] * scale;
        float &peak = peaks[2 * column + i], &total = totals[2 * column + i];
        const float top = fmaxf(peak, fmaxf(low, high));
        total = total * ptx::exp2(peak - top) + (ptx::exp2(low - top) + ptx::exp2(high - top));
        peak = top;
      }
    });
  }
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
#pragma unroll
    for (int d = 4; d < WARP; d *= 2)
      unite(peaks[i], totals[i], __shfl_xor_sync(ALL_LANES, peaks[i], d), __shfl_xor_sync(ALL_LANES, totals[i], d));
    if (lane < 4)
      shared.stats[warp % SLICES][warp / SLICES * HALF + i / 2 * 8 + lane * 2 + i % 2] = {peaks[i], totals[i]};
  }
  __syncthreads();
  const int row = first_row + threadIdx.x;
  if (int(threadIdx.x) >= ROWS || row >= problem.rows()) return;
  float2 all = shared.stats[0][threadIdx.x];
#pragma unroll
  for (int s = 1; s < SLICES; ++s) {
    const float2 more = shared.stats[s][threadIdx.x];
    unite(all.x, all.y, more.x, more.y);
  }
  stats[(i64(problem.head) * problem.rows() + row) * gridDim.x + blockIdx.x] = all;
}

// bases (rows,) = log2 of the sum of 2^score over all `chunks` of stats (rows, chunks). Grid (rows / 8, up), a row a
// warp of 256 threads.
extern "C" __global__ void __launch_bounds__(256)
received_bases(const float2* stats, int rows, int chunks, float* bases) {
  const int lane = threadIdx.x % WARP, row = blockIdx.x * WARPS + threadIdx.x / WARP;
  if (row >= rows) return;
  float peak = NOTHING, total = 0;
  for (int i = lane; i < chunks; i += WARP) {
    const float2 more = stats[i64(row) * chunks + i];
    unite(peak, total, more.x, more.y);
  }
#pragma unroll
  for (int d = 1; d < WARP; d *= 2)
    unite(peak, total, __shfl_xor_sync(ALL_LANES, peak, d), __shfl_xor_sync(ALL_LANES, total, d));
  if (lane == 0) bases[row] = peak + log2f(total);
}

// out (kv_heads, m) += 2^(score - base) summed over the rows; bases (kv_heads, rows).
// Grid (chunks, kv_heads), 256 threads; sizeof(Shared) bytes of shared memory.
extern "C" __global__ void __launch_bounds__(256, BLOCKS)
received_sums(const float* q, const float* keys, int n, int position, int m, int group, float scale, int tiles,
              const float* bases, float* out) {
  KVRT_DYNAMIC_SHARED(memory);
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const Problem problem{q, keys, n, position, int(gridDim.y), group, int(blockIdx.y)};
  const int begin = blockIdx.x * tiles * KEYS, end = min(begin + tiles * KEYS, problem.seen());
  for (int first_row = 0; first_row < problem.rows(); first_row += ROWS) {
    __syncthreads();  // the rows before have been read
    problem.load_queries(shared, first_row);
    if (int(threadIdx.x) < ROWS) {
      const int row = first_row + threadIdx.x;  // where there is none, weights are zeros
      shared.bases[threadIdx.x] = row < problem.rows() ? bases[i64(problem.head) * problem.rows() + row] : -NOTHING;
    }
    for (int tile = begin; tile < end; tile += KEYS) {
      __syncthreads();
      problem.load_keys(shared, tile);
      __syncthreads();
      const bool masked = tile + KEYS > position;
      float sums[2] = {0, 0};
      each_score(shared, [&](int column, float* scores) {
        if (masked) mask(scores, shared, tile, column);
        const float* own = shared.bases + warp / SLICES * HALF + column * 8 + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i / 2] += ptx::exp2(fmaf(scores[i], scale, -own[i % 2]));
      });
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int d = 1; d < 4; d *= 2) sums[i] += __shfl_xor_sync(ALL_LANES, sums[i], d);
        if (lane % 4 == 0) shared.sums[warp / SLICES][warp % SLICES * 16 + i * 8 + lane / 4] = sums[i];
      }
      __syncthreads();
      const int key = tile + threadIdx.x;
      if (int(threadIdx.x) < KEYS && key < problem.seen())
        out[i64(problem.head) * m + key] += shared.sums[0][threadIdx.x] + shared.sums[1][threadIdx.x];
    }
  }
}
