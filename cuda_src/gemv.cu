// Projections of one token, bound by reading the weights once.
//
// -DKIND: 0 f32, 1 f16, 2 bf16 weights.
// Launch: any block of whole warps up to 512 threads, any grid (best: each block has a multiprocessor to itself, and
// most warps have columns); shared bytes = block * (128 + pieces * 4 * ITEMS), where a thread takes 16 bytes of each
// piece of a row: ITEMS = 4 for f32, else 8, pieces = ceil(cols / (block * ITEMS)).
//
// A block takes rows, a thread the same columns of all of them, through a ring in shared memory that only it uses.
// The ring is filled before the wait for x: the memory works on while the kernel before ends.
#include "reduce.cuh"

static constexpr int BYTES = KIND == 0 ? 4 : 2, ITEMS = 16 / BYTES, QUADS = ITEMS / 4, MOST_WARPS = 16;
static constexpr int ROWS = 8;    // of a run; as many 16 bytes of each thread are under way
static constexpr int UNIT = 4;    // of these are waited for at once
static constexpr int WINDOW = 4;  // runs are summed up over the block at once

#if KIND != 0
KVRT_INLINE float2 unpack(u32 x) {
#if KIND == 1
  return ptx::unpack_half(x);
#else
  return ptx::unpack_bfloat(x);
#endif
}
#endif

// sum + the products of 16 bytes of weights with as many of x.
KVRT_INLINE float dot(uint4 w, const float4* x, float sum) {
#if KIND == 0
  sum += __uint_as_float(w.x) * x[0].x;
  sum += __uint_as_float(w.y) * x[0].y;
  sum += __uint_as_float(w.z) * x[0].z;
  return sum + __uint_as_float(w.w) * x[0].w;
#else
  const float2 p = unpack(w.x), q = unpack(w.y), r = unpack(w.z), s = unpack(w.w);
  sum += p.x * x[0].x;
  sum += p.y * x[0].y;
  sum += q.x * x[0].z;
  sum += q.y * x[0].w;
  sum += r.x * x[1].x;
  sum += r.y * x[1].y;
  sum += s.x * x[1].z;
  return sum + s.y * x[1].w;
#endif
}

// Up to 16 bytes from any address, as the memory of the row has them; zeros after `count` items.
KVRT_INLINE uint4 gather(const u8* from, int count) {
  u32 word[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (i >= count) break;
#if KIND == 0
    word[i] = reinterpret_cast<const u32*>(from)[i];
#else
    word[i / 2] |= u32(reinterpret_cast<const u16*>(from)[i]) << 16 * (i & 1);
#endif
  }
  return uint4{word[0], word[1], word[2], word[3]};
}

// The sums over a warp of 8 numbers of each lane: lane i gets that of number i % 8.
KVRT_INLINE float spread_sum(const float* sums) {
  const int lane = threadIdx.x % WARP;
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float keep = lane & 1 ? sums[2 * i + 1] : sums[2 * i], give = lane & 1 ? sums[2 * i] : sums[2 * i + 1];
    four[i] = keep + __shfl_xor_sync(ALL_LANES, give, 1);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float keep = lane & 2 ? four[2 * i + 1] : four[2 * i], give = lane & 2 ? four[2 * i] : four[2 * i + 1];
    two[i] = keep + __shfl_xor_sync(ALL_LANES, give, 2);
  }
  float one = (lane & 4 ? two[1] : two[0]) + __shfl_xor_sync(ALL_LANES, lane & 4 ? two[0] : two[1], 4);
  one += __shfl_xor_sync(ALL_LANES, one, 8);
  return one + __shfl_xor_sync(ALL_LANES, one, 16);
}

// The columns of the calling thread: 16 bytes of each piece of a row.
struct Mine {
  int cols, first, step, pieces;

  KVRT_INLINE explicit Mine(int cols) : cols(cols) {
    first = threadIdx.x * ITEMS;
    step = blockDim.x * ITEMS;
    pieces = first < cols ? (cols - first + step - 1) / step : 0;
  }
  KVRT_INLINE int column(int piece) const { return first + piece * step; }
};

// The runs of at most ROWS rows that the calling block takes, one after the other. All blocks go through the rows
// side by side, which memory likes best; what is left for the last round they share evenly. A run does not cross
// a border (`border(row)` is the end of row's matrix), and has whole tasks of GROUP rows.
template <int GROUP, class Border>
struct Runs {
  static constexpr int TASKS = ROWS / GROUP;
  int rows, row, stop, count, round;
  Border border;

  KVRT_INLINE Runs(int rows, Border border) : rows(rows), round(-1), border(border) {
    row = stop = 0;
    find();
  }
  KVRT_INLINE bool done() const { return count == 0; }
  KVRT_INLINE void advance() {
    row += count;
    find();
  }
  KVRT_INLINE void find() {
    if (row == stop) {
      const int tasks = rows / GROUP, all = gridDim.x * TASKS, first = ++round * all, left = tasks - first;
      const int mine = blockIdx.x;
      row = stop = 0;
      if (left >= all) row = (first + mine * TASKS) * GROUP, stop = row + ROWS;
      else if (left > 0) {
        row = (first + int(i64(left) * mine / gridDim.x)) * GROUP;
        stop = (first + int(i64(left) * (mine + 1) / gridDim.x)) * GROUP;
      }
    }
    count = min(stop, border(row)) - row;
  }
};

// Four numbers of an array of `count`, zeros beyond.
KVRT_INLINE float4 read4(const float* from, int at, int count) {
  float4 v{0, 0, 0, 0};
  if (at < count) v.x = from[at];
  if (at + 1 < count) v.y = from[at + 1];
  if (at + 2 < count) v.z = from[at + 2];
  if (at + 3 < count) v.w = from[at + 3];
  return v;
}

// Numbers of f32 in the calling thread's columns: of a few pieces of a row, from `first` on.
struct Columns {
  static constexpr int PIECES = 4;
  float4 of[PIECES][QUADS];

  // All loads are under way at once; nothing waits for them here.
  template <bool WIDE>
  KVRT_INLINE void load(const float* from, int first, const Mine& mine) {
#pragma unroll
    for (int p = 0; p < PIECES; ++p)
#pragma unroll
      for (int q = 0; q < QUADS; ++q) {
        const int at = mine.column(first + p) + 4 * q;
        of[p][q] = float4{0, 0, 0, 0};
        if (first + p >= mine.pieces) continue;
        of[p][q] = WIDE ? *reinterpret_cast<const float4*>(from + at) : read4(from, at, mine.cols);
      }
  }
};

// x' for the calling thread's columns into `kept` (pieces, QUADS, lanes) of its warp: x, or x times norm, of which
// `gains` has the first pieces. The sum of its x squared.
template <bool WIDE>
KVRT_INLINE float keep_x(float4* kept, const float* x, const float* norm, Columns& gains, const Mine& mine) {
  float squares = 0;
  for (int first = 0; first < mine.pieces; first += Columns::PIECES) {
    Columns part;
    part.load<WIDE>(x, first, mine);
    if (norm && first) gains.load<WIDE>(norm, first, mine);
#pragma unroll
    for (int p = 0; p < Columns::PIECES; ++p) {
      if (first + p >= mine.pieces) break;
#pragma unroll
      for (int q = 0; q < QUADS; ++q) {
        float4 v = part.of[p][q];
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        const float4 by = gains.of[p][q];
        if (norm) v = float4{v.x * by.x, v.y * by.y, v.z * by.z, v.w * by.w};
        kept[((first + p) * QUADS + q) * WARP] = v;
      }
    }
  }
  return squares;
}

// Two addresses: of the even and of the odd rows of a run, in this thread's columns.
struct Pair {
  const u8 *even, *odd;
};

// Each warp's part of sums.
struct Parts {
  float of[2][WINDOW * ROWS][MOST_WARPS + 1], squares[MOST_WARPS];
};

// The sum of one number of each of the block's warps.
KVRT_INLINE float sum_of_warps(const float* parts) {
  float all[MOST_WARPS], sum = 0;
#pragma unroll
  for (int w = 0; w < MOST_WARPS; ++w) all[w] = w * WARP < int(blockDim.x) ? parts[w] : 0.0f;
#pragma unroll
  for (int w = 0; w < MOST_WARPS; ++w) sum += all[w];
  return sum;
}

// Dot products of x' with `rows` rows in tasks of GROUP. locate(row) has the addresses of a row and of the next,
// `pitch` bytes lie between a row and the next but one, before(task) is what a task needs of memory besides,
// finish(task, sums, that) gets its GROUP products: both are called by one thread.
template <bool WIDE, int GROUP, class Border, class Locate, class Before, class Finish>
KVRT_INLINE void project(Parts& parts, int rows, const float* x, const float* norm, float eps, int cols, i64 pitch,
                         Border border, Locate locate, Before before, Finish finish) {
  KVRT_DYNAMIC_SHARED(memory);
  constexpr int TASKS = ROWS / GROUP;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
  const Mine mine(cols);
  const int most = (cols + mine.step - 1) / mine.step;
  uint4* const ring = reinterpret_cast<uint4*>(memory) + warp * (ROWS * WARP) + lane;
  float4* const kept = reinterpret_cast<float4*>(memory) + (warps * ROWS + warp * most * QUADS) * WARP + lane;

  const auto once = ptx::read_once();  // so that what every layer needs, code too, is not pushed out by weights
  // What the ring is filled with next: a piece of a run.
  Runs<GROUP, Border> ahead(rows, border);
  int ahead_piece = 0;
  Pair from{};
  auto find = [&] {
    if (ahead.done()) return;
    from = locate(ahead.row);
    from.even += mine.first * BYTES, from.odd += mine.first * BYTES;
  };
  auto fill = [&](uint4* slot, int r) {
    if (r >= ahead.count) return;
    const u8* const at = (r & 1 ? from.odd : from.even) + (r >> 1) * pitch;
    if (WIDE) ptx::copy_async16(slot, at, once);
    else *slot = gather(at, cols - mine.column(ahead_piece));
  };
  auto advance = [&] {
    from.even += mine.step * BYTES, from.odd += mine.step * BYTES;
    if (++ahead_piece < mine.pieces) return;
    ahead_piece = 0;
    ahead.advance();
    find();
  };
  if (mine.pieces) {
    find();
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      fill(ring + r * WARP, r);
      if (r % UNIT == UNIT - 1) ptx::commit_copies();
    }
    advance();
  }
  Columns gains{};
  if (norm) gains.load<WIDE>(norm, 0, mine);  // weights, too: they wait for nobody
  ptx::wait_for_previous();
  const float squares = warp_sum(keep_x<WIDE>(kept, x, norm, gains, mine));
  if (lane == 0) parts.squares[warp] = squares;

  Runs<GROUP, Border> now(rows, border);
  for (int turn = 0; !now.done(); turn ^= 1) {
    int task = -1;
    float2 held = {0, 0};
    for (int i = 0; i < WINDOW && !now.done(); ++i, now.advance()) {
      if (threadIdx.x / TASKS == i && int(threadIdx.x) % TASKS < now.count / GROUP) {
        task = now.row / GROUP + threadIdx.x % TASKS;
        held = before(task);
      }
      float sums[ROWS] = {};  // those beyond the run's rows are of no use
      for (int p = 0; p < mine.pieces; ++p, advance()) {
        float4 part[QUADS];
#pragma unroll
        for (int q = 0; q < QUADS; ++q) part[q] = kept[(p * QUADS + q) * WARP];
#pragma unroll
        for (int first = 0; first < ROWS; first += UNIT) {
          uint4* const slot = ring + first * WARP;
          uint4 w[UNIT];
          ptx::wait_copies<ROWS / UNIT - 1>();
#pragma unroll
          for (int r = 0; r < UNIT; ++r) w[r] = slot[r * WARP];
#pragma unroll
          for (int r = 0; r < UNIT; ++r) fill(slot + r * WARP, first + r);
          ptx::commit_copies();
#pragma unroll
          for (int r = 0; r < UNIT; ++r) sums[first + r] = dot(w[r], part, sums[first + r]);
        }
      }
      const float sum = spread_sum(sums);
      if (lane < ROWS) parts.of[turn][i * ROWS + lane][warp] = sum;
    }
    __syncthreads();
    if (task >= 0) {
      const float scale = norm ? 1.0f / __fsqrt_rn(sum_of_warps(parts.squares) / cols + eps) : 1.0f;
      float totals[GROUP];
#pragma unroll
      for (int g = 0; g < GROUP; ++g) totals[g] = sum_of_warps(parts.of[turn][threadIdx.x * GROUP + g]) * scale;
      finish(task, totals, held);
    }
  }
}

KVRT_INLINE bool is_wide(int cols, const void* x, const void* norm, const void* a, const void* b, const void* c) {
  const i64 all = reinterpret_cast<i64>(x) | reinterpret_cast<i64>(norm) | reinterpret_cast<i64>(a) |
                  reinterpret_cast<i64>(b) | reinterpret_cast<i64>(c);
  return cols % ITEMS == 0 && (all & 15) == 0;
}

// out_i (n_i) = (or += with `add`) x' @ w_i (n_i, cols).T + bias_i, i < 3; n_i may be 0, biases null.
// x' is x (cols) f32, or x / sqrt(mean(x^2) + eps) * norm (cols) where norm is not null.
extern "C" __global__ void __launch_bounds__(MOST_WARPS * WARP) linear(
    const float* x, int cols, const float* norm, float eps, int add, const u8* w0, int n0, const float* bias0,
    float* out0, const u8* w1, int n1, const float* bias1, float* out1, const u8* w2, int n2, const float* bias2,
    float* out2) {
  const i64 pitch = i64(cols) * BYTES;
  auto border = [=](int row) { return row < n0 ? n0 : row < n0 + n1 ? n0 + n1 : n0 + n1 + n2; };
  auto locate = [=](int row) {
    const u8* const w = row < n0 ? w0 : row < n0 + n1 ? w1 : w2;
    const u8* const at = w + (row < n0 ? row : row < n0 + n1 ? row - n0 : row - n0 - n1) * pitch;
    return Pair{at, at + pitch};
  };
  auto target = [=](int row) { return row < n0 ? out0 + row : row < n0 + n1 ? out1 + row - n0 : out2 + row - n0 - n1; };
  auto before = [=](int row) {
    const float* const bias = row < n0 ? bias0 : row < n0 + n1 ? bias1 : bias2;
    const int at = row < n0 ? row : row < n0 + n1 ? row - n0 : row - n0 - n1;
    return float2{bias ? bias[at] : 0.0f, add ? *target(row) : 0.0f};
  };
  auto finish = [=](int row, const float* sum, float2 held) { *target(row) = sum[0] + held.x + held.y; };
  ptx::let_next_start();
  __shared__ Parts parts;
  const int rows = n0 + n1 + n2;
  if (is_wide(cols, x, norm, w0, n1 ? w1 : w0, n2 ? w2 : w0))
    project<true, 1>(parts, rows, x, norm, eps, cols, 2 * pitch, border, locate, before, finish);
  else
    project<false, 1>(parts, rows, x, norm, eps, cols, 2 * pitch, border, locate, before, finish);
}

// out (n) = silu(x' @ gate (n, cols).T + gate_bias) * (x' @ up (n, cols).T + up_bias); x' as in linear.
extern "C" __global__ void __launch_bounds__(MOST_WARPS * WARP) swiglu(
    const float* x, int cols, const float* norm, float eps, const u8* gate, const float* gate_bias, const u8* up,
    const float* up_bias, int n, float* out) {
  const i64 pitch = i64(cols) * BYTES;
  auto border = [=](int) { return 2 * n; };
  auto locate = [=](int row) { return Pair{gate + (row >> 1) * pitch, up + (row >> 1) * pitch}; };
  auto before = [=](int at) { return float2{gate_bias ? gate_bias[at] : 0.0f, up_bias ? up_bias[at] : 0.0f}; };
  auto finish = [=](int at, const float* sums, float2 held) {
    out[at] = silu(sums[0] + held.x) * (sums[1] + held.y);
  };
  ptx::let_next_start();
  __shared__ Parts parts;
  if (is_wide(cols, x, norm, gate, up, up))
    project<true, 2>(parts, 2 * n, x, norm, eps, cols, pitch, border, locate, before, finish);
  else
    project<false, 2>(parts, 2 * n, x, norm, eps, cols, pitch, border, locate, before, finish);
}
