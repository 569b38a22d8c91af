// The element-wise kernels of a decoder, and probes. Grids are free where "strided" is said: any number of
// blocks of whole warps, of which each thread takes every so-manieth element. `kind`: 0 f32, 1 f16, 2 bf16.
#include "reduce.cuh"

KVRT_INLINE i64 first_item() { return i64(blockIdx.x) * blockDim.x + threadIdx.x; }
KVRT_INLINE i64 all_threads() { return i64(gridDim.x) * blockDim.x; }

KVRT_INLINE float read_stored(const u8* at, i64 i, int kind) {
  if (kind == 0) return reinterpret_cast<const float*>(at)[i];
  const u16 bits = reinterpret_cast<const u16*>(at)[i];
  return kind == 1 ? ptx::half_to_float(bits) : ptx::bfloat_to_float(bits);
}

// Beyond the largest half: that. NaN stays NaN.
KVRT_INLINE float saturate(float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; }

// out (tokens, cols) f32 = rows ids (tokens) of a table (vocab, cols) of `kind`. Grid (tokens,), any block.
extern "C" __global__ void embed(const i64* ids, const u8* table, int kind, int cols, float* out) {
  ptx::let_next_start();
  const i64 from = ids[blockIdx.x] * cols, to = i64(blockIdx.x) * cols;
  for (int c = threadIdx.x; c < cols; c += blockDim.x) out[to + c] = read_stored(table, from + c, kind);
}

// out (rows, cols) = x / sqrt(mean(x^2) + eps) * weight (cols); out may be x. Grid (rows,), block of whole warps.
extern "C" __global__ void __launch_bounds__(1024) rmsnorm(
    const float* x, const float* weight, int cols, float eps, float* out) {
  __shared__ float scratch[32];
  const i64 row = i64(blockIdx.x) * cols;
  float squares = 0;
  for (int c = threadIdx.x; c < cols; c += blockDim.x) squares += x[row + c] * x[row + c];
  const float scale = 1.0f / __fsqrt_rn(block_sum(squares, scratch) / cols + eps);
  for (int c = threadIdx.x; c < cols; c += blockDim.x) out[row + c] = x[row + c] * scale * weight[c];
}

// Rotate pairs (i, i + dim/2) of x (n, heads, dim) in place; cos, sin (n, dim/2). Grid (n,), any block.
extern "C" __global__ void rope(float* x, int heads, int dim, const float* cos, const float* sin) {
  const int half = dim / 2;
  const i64 angle = i64(blockIdx.x) * half;
  for (int i = threadIdx.x; i < heads * half; i += blockDim.x) {
    const int j = i % half;
    float* const at = x + (i64(blockIdx.x) * heads + i / half) * dim + j;
    const float low = at[0], high = at[half], c = cos[angle + j], s = sin[angle + j];
    at[0] = low * c - high * s;
    at[half] = high * c + low * s;
  }
}

// gate (count) = silu(gate) * up, in place. Strided.
extern "C" __global__ void silu_mul(float* gate, const float* up, i64 count) {
  for (i64 i = first_item(); i < count; i += all_threads()) gate[i] = silu(gate[i]) * up[i];
}

// out (count) of kind 1 (f16, at most 65504 in size) or 2 (bf16) = x (count) f32. Strided, 4 an item.
extern "C" __global__ void narrow(const float4* x, i64 count, int kind, uint2* out) {
  for (i64 i = first_item(); i < (count + 3) / 4; i += all_threads()) {
    if (4 * i + 4 <= count) {
      const float4 v = x[i];
      out[i] = kind == 1 ? uint2{ptx::pack_half(saturate(v.x), saturate(v.y)),
                                 ptx::pack_half(saturate(v.z), saturate(v.w))}
                         : uint2{ptx::pack_bfloat(v.x, v.y), ptx::pack_bfloat(v.z, v.w)};
      continue;
    }
    for (i64 j = 4 * i; j < count; ++j) {
      const float v = reinterpret_cast<const float*>(x)[j];
      reinterpret_cast<u16*>(out)[j] = kind == 1 ? ptx::float_to_half(saturate(v)) : ptx::float_to_bfloat(v);
    }
  }
}

// out (2, count) of kind 1 or 2 = x (count) f32, and what x lost by that. Strided.
extern "C" __global__ void split(const float* x, i64 count, int kind, u16* out) {
  for (i64 i = first_item(); i < count; i += all_threads()) {
    const u16 bits = kind == 1 ? ptx::float_to_half(saturate(x[i])) : ptx::float_to_bfloat(x[i]);
    const float rest = x[i] - (kind == 1 ? ptx::half_to_float(bits) : ptx::bfloat_to_float(bits));
    out[i] = bits;
    out[count + i] = kind == 1 ? ptx::float_to_half(saturate(rest)) : ptx::float_to_bfloat(rest);
  }
}

// out (count) = (or += with `add`) the sum of parts (2, count). Strided.
extern "C" __global__ void sum_parts(const float* parts, i64 count, int add, float* out) {
  for (i64 i = first_item(); i < count; i += all_threads()) {
    const float sum = parts[i] + parts[count + i];
    out[i] = add ? out[i] + sum : sum;
  }
}

// x (count / cols, cols) += bias (cols). Strided.
extern "C" __global__ void add_bias(float* x, const float* bias, i64 count, int cols) {
  for (i64 i = first_item(); i < count; i += all_threads()) x[i] += bias[i % cols];
}

// best (2) = the first index of the largest of logits (count), and the bits of its value; a NaN is the largest.
// Grid (1,), block of whole warps, 1024 best.
extern "C" __global__ void __launch_bounds__(1024) argmax(const float* logits, int count, i64* best) {
  __shared__ float tops[32];
  __shared__ int places[32];
  const float lowest = __uint_as_float(0xFF800000u);
  const int none = 0x7FFFFFFF;
  float top = lowest;
  int place = none;
  // `none` loses to -inf, which is a number: equals go to the lower place.
  auto offer = [&](float v, int i) {
    const bool nan = v != v, held = top != top;
    if (nan != held ? nan : v > top || ((v == top || nan) && i < place)) top = v, place = i;
  };
  for (int i = threadIdx.x; i < count; i += blockDim.x) offer(logits[i], i);
  auto over_warp = [&] {
    for (int by = WARP / 2; by; by >>= 1) {
      const float v = __shfl_xor_sync(ALL_LANES, top, by);
      const int i = __shfl_xor_sync(ALL_LANES, place, by);
      offer(v, i);
    }
  };
  over_warp();
  if (threadIdx.x % WARP == 0) tops[threadIdx.x / WARP] = top, places[threadIdx.x / WARP] = place;
  __syncthreads();
  if (threadIdx.x >= WARP) return;
  const bool mine = threadIdx.x < blockDim.x / WARP;
  top = mine ? tops[threadIdx.x] : lowest;
  place = mine ? places[threadIdx.x] : none;
  over_warp();
  if (threadIdx.x == 0) best[0] = place, best[1] = __float_as_uint(top);
}

KVRT_INLINE u32 mix(u32 x) {
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return x ^ x >> 16;
}

// out (count) of `kind`: uniform in -scale .. scale, the bits of the CPU's random_rows. Strided.
extern "C" __global__ void random_rows(u8* out, int kind, i64 count, u32 low, u32 high, float scale) {
  for (i64 i = first_item(); i < count; i += all_threads()) {
    const u32 bits = mix(mix(u32(i) ^ low) + high);
    const float x = (float(bits >> 8) * (1.0f / 8388608.0f) - 1.0f) * scale;
    if (kind == 0) reinterpret_cast<float*>(out)[i] = x;
    else reinterpret_cast<u16*>(out)[i] = kind == 1 ? ptx::float_to_half(x) : ptx::float_to_bfloat(x);
  }
}

// sums (threads of the grid) u32 = sums modulo 2^32 of the words that each read of a buffer of `count` 16 bytes.
// Strided, 4 loads under way a thread.
extern "C" __global__ void read_words(const uint4* buffer, i64 count, u32* sums) {
  const i64 step = all_threads();
  u32 total = 0;
  i64 i = first_item();
  for (; i + 3 * step < count; i += 4 * step) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = ptx::load_stream(buffer + i + j * step);
#pragma unroll
    for (int j = 0; j < 4; ++j) total += v[j].x + v[j].y + v[j].z + v[j].w;
  }
  for (; i < count; i += step) {
    const uint4 v = ptx::load_stream(buffer + i);
    total += v.x + v.y + v.z + v.w;
  }
  sums[first_item()] = total;
}
