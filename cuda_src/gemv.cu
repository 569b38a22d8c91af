// Projections of 1 .. 4 tokens, bound by reading the weights once.
//
// -DKIND: 0 f32, 1 f16, 2 bf16 weights; -DBLOCK threads (256); -DN_TOKENS rows of x (1).
// Launch: block (BLOCK,), shared bytes = N_TOKENS * 4 * (cols rounded up to 256), grid =
// min(ceil(tasks / (BLOCK / 32)), SMs * C) with C = min(3, shared memory of an SM / shared bytes), where
// a task is two rows of all matrices together for `linear`, one row of gate and of up for `swiglu`. A warp
// takes a task at a time. With 256 threads 4096 rows are 256 blocks, 6144 are 384: nearly whole waves of 132.
#include "reduce.cuh"

#ifndef BLOCK
#define BLOCK 256
#endif
#ifndef N_TOKENS
#define N_TOKENS 1
#endif

// A step is 256 columns of a row: 8 of each lane. A lane has PAIR * STEPS loads under way.
static constexpr int STEP = 256, PAIR = 2, STEPS = 4, WARPS = BLOCK / WARP;

// Where column c lies in shared memory: the low 4 of each lane's 8 columns, then the high 4, so that
// the 16-byte reads of neighbouring lanes touch neighbouring banks.
KVRT_INLINE int place_of(int c) { return (c & ~255) | (c & 4) << 5 | (c >> 3 & 31) << 2 | (c & 3); }

KVRT_INLINE int padded(int cols) { return (cols + STEP - 1) / STEP * STEP; }

#if KIND != 0
struct Words {
  uint4 at[PAIR][STEPS];
};

// Steps `first` .. of two rows; zeros beyond the columns. `wide`: 16-byte loads are possible.
KVRT_INLINE void load(Words& w, const u16* const* rows, int first, int cols, bool wide) {
  const int mine = first + threadIdx.x % WARP * 8;
  if (wide) {  // no branches between the loads: they leave one after the other
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int r = 0; r < PAIR; ++r) {
        w.at[r][s] = uint4{0, 0, 0, 0};
        if (mine + s * STEP < cols) w.at[r][s] = ptx::load_stream(rows[r] + mine + s * STEP);
      }
    return;
  }
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
#pragma unroll
    for (int r = 0; r < PAIR; ++r) {
      u32 word[4] = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int c = mine + s * STEP + i;
        if (c < cols) word[i / 2] |= u32(rows[r][c]) << 16 * (i & 1);
      }
      w.at[r][s] = uint4{word[0], word[1], word[2], word[3]};
    }
}

KVRT_INLINE float2 unpack(u32 x) {
#if KIND == 1
  return ptx::unpack_half(x);
#else
  return ptx::unpack_bfloat(x);
#endif
}

KVRT_INLINE float dot8(uint4 w, float4 a, float4 b, float sum) {
  const float2 p = unpack(w.x), q = unpack(w.y), r = unpack(w.z), s = unpack(w.w);
  sum += p.x * a.x;
  sum += p.y * a.y;
  sum += q.x * a.z;
  sum += q.y * a.w;
  sum += r.x * b.x;
  sum += r.y * b.y;
  sum += s.x * b.z;
  return sum + s.y * b.w;
}

KVRT_INLINE void multiply(const Words& w, const float* x, int first, int cols, float (*sums)[N_TOKENS]) {
  const int lane = threadIdx.x % WARP, pitch = padded(cols);
#pragma unroll
  for (int s = 0; s < STEPS; ++s) {
    const int c = first + s * STEP;
    if (c >= cols) break;
#pragma unroll
    for (int t = 0; t < N_TOKENS; ++t) {
      const float4* const at = reinterpret_cast<const float4*>(x + t * pitch + c) + lane;
      const float4 a = at[0], b = at[WARP];
#pragma unroll
      for (int r = 0; r < PAIR; ++r) sums[r][t] = dot8(w.at[r][s], a, b, sums[r][t]);
    }
  }
}
#endif

// x (N_TOKENS, cols) to shared memory, padded with zeros; with `norm` as x / rms(x) * norm.
KVRT_INLINE void prepare(float* shared, const float* x, const float* norm, float eps, int cols) {
  __shared__ float scratch[32];
  const int pitch = padded(cols);
  for (int t = 0; t < N_TOKENS; ++t) {
    float* const target = shared + t * pitch;
    float squares = 0;
    for (int c = threadIdx.x; c < pitch; c += BLOCK) {
      const float v = c < cols ? x[i64(t) * cols + c] : 0.0f;
      target[place_of(c)] = v;
      squares += v * v;
    }
    if (!norm) continue;
    const float scale = 1.0f / __fsqrt_rn(block_sum(squares, scratch) / cols + eps);
    for (int c = threadIdx.x; c < cols; c += BLOCK) target[place_of(c)] *= scale * norm[c];
  }
  __syncthreads();
}

// For each task of the calling warp: locate(task, rows) finds the addresses of two rows, finish(task, sums)
// is called by all lanes with their dot products with each token.
template <class Locate, class Finish>
KVRT_INLINE void project(int tasks, const float* x, const float* norm, float eps, int cols, bool wide,
                         Locate locate, Finish finish) {
  KVRT_DYNAMIC_SHARED(memory);
  float* const shared = reinterpret_cast<float*>(memory);
  int task = blockIdx.x * WARPS + threadIdx.x / WARP;
  const u8* found[PAIR];
#if KIND != 0
  Words words;
  if (task < tasks) {  // weights wait for nothing: their loads run while x is made ready
    locate(task, found);
    const u16* const rows[PAIR] = {reinterpret_cast<const u16*>(found[0]), reinterpret_cast<const u16*>(found[1])};
    load(words, rows, 0, cols, wide);
  }
#endif
  prepare(shared, x, norm, eps, cols);
  for (bool loaded = true; task < tasks; task += gridDim.x * WARPS, loaded = false) {
    float sums[PAIR][N_TOKENS] = {};
    locate(task, found);
#if KIND == 0
    for (int c = threadIdx.x % WARP; c < cols; c += WARP)
      for (int r = 0; r < PAIR; ++r)
        for (int t = 0; t < N_TOKENS; ++t)
          sums[r][t] += reinterpret_cast<const float*>(found[r])[c] * shared[t * padded(cols) + place_of(c)];
#else
    const u16* const rows[PAIR] = {reinterpret_cast<const u16*>(found[0]), reinterpret_cast<const u16*>(found[1])};
    for (int first = 0; first < cols; first += STEP * STEPS) {
      if (first || !loaded) load(words, rows, first, cols, wide);
      multiply(words, shared, first, cols, sums);
    }
#endif
    for (int r = 0; r < PAIR; ++r)
      for (int t = 0; t < N_TOKENS; ++t) sums[r][t] = warp_sum(sums[r][t]);
    finish(task, sums);
  }
}

KVRT_INLINE bool is_wide(int cols, const void* a, const void* b, const void* c) {
  return cols % 8 == 0 && ((reinterpret_cast<i64>(a) | reinterpret_cast<i64>(b) | reinterpret_cast<i64>(c)) & 15) == 0;
}

static constexpr int ITEM = KIND == 0 ? 4 : 2;

// out_i (N_TOKENS, n_i) = (or += with `add`) x' @ w_i (n_i, cols).T + bias_i, i < 3; n_i may be 0, biases null.
// x' is x (N_TOKENS, cols) f32, or x / sqrt(mean(x^2) + eps) * norm (cols) where norm is not null.
extern "C" __global__ void __launch_bounds__(BLOCK) linear(
    const float* x, int cols, const float* norm, float eps, int add, const u8* w0, int n0, const float* bias0,
    float* out0, const u8* w1, int n1, const float* bias1, float* out1, const u8* w2, int n2, const float* bias2,
    float* out2) {
  const int rows = n0 + n1 + n2;
  auto locate = [=](int task, const u8** found) {
    for (int r = 0; r < PAIR; ++r) {
      const int row = min(task * PAIR + r, rows - 1);  // an odd last row is read twice, written once
      const u8* const w = row < n0 ? w0 : row < n0 + n1 ? w1 : w2;
      const int at = row < n0 ? row : row < n0 + n1 ? row - n0 : row - n0 - n1;
      found[r] = w + i64(at) * cols * ITEM;
    }
  };
  auto finish = [=](int task, const float (*sums)[N_TOKENS]) {
    if (threadIdx.x % WARP) return;
    for (int r = 0; r < PAIR; ++r) {
      const int row = task * PAIR + r;
      if (row >= rows) break;
      const int which = row < n0 ? 0 : row < n0 + n1 ? 1 : 2;
      const int at = which == 0 ? row : which == 1 ? row - n0 : row - n0 - n1;
      const int n = which == 0 ? n0 : which == 1 ? n1 : n2;
      const float* const bias = which == 0 ? bias0 : which == 1 ? bias1 : bias2;
      float* const out = which == 0 ? out0 : which == 1 ? out1 : out2;
      for (int t = 0; t < N_TOKENS; ++t) {
        float* const target = out + i64(t) * n + at;
        const float sum = sums[r][t] + (bias ? bias[at] : 0.0f);
        *target = add ? *target + sum : sum;
      }
    }
  };
  project((rows + 1) / PAIR, x, norm, eps, cols, is_wide(cols, w0, n1 ? w1 : w0, n2 ? w2 : w0), locate, finish);
}

// out (N_TOKENS, n) = silu(x' @ gate (n, cols).T + gate_bias) * (x' @ up (n, cols).T + up_bias); x' as in linear.
extern "C" __global__ void __launch_bounds__(BLOCK) swiglu(
    const float* x, int cols, const float* norm, float eps, const u8* gate, const float* gate_bias, const u8* up,
    const float* up_bias, int n, float* out) {
  auto locate = [=](int task, const u8** found) {
    found[0] = gate + i64(task) * cols * ITEM;
    found[1] = up + i64(task) * cols * ITEM;
  };
  auto finish = [=](int task, const float (*sums)[N_TOKENS]) {
    if (threadIdx.x % WARP) return;
    for (int t = 0; t < N_TOKENS; ++t) {
      const float g = sums[0][t] + (gate_bias ? gate_bias[task] : 0.0f);
      const float u = sums[1][t] + (up_bias ? up_bias[task] : 0.0f);
      out[i64(t) * n + task] = silu(g) * u;
    }
  };
  project(n, x, norm, eps, cols, is_wide(cols, gate, up, up), locate, finish);
}
