// Zones: what widths would cost, and blocks of kept tokens written and read. Twins of kvrt/backends/cpu_zones.py: what
// is encoded and summed has the same bits (compiled with -fmad=false). See kvrt/trizone/layout.py for a block.
//
// keys, values are (n, heads, dim) f32; of block u, tokens firsts[u] ... of the list `tokens` are rows of them, and
// heads[u] is the head. Threads are THREADS; shared memory is 64 * (dim + 1) floats: a tile.
#include "zone_block.cuh"
#include "zone_levels.cuh"

// Rows of 64 of a block of `value_errors`, one a thread.
static constexpr int ERROR_ROWS = 64;

// out (4, heads, n) f32 = sum x^2 of each token, then its squared errors at 2, 4 and 8 bits.
// Grid (n * heads / 64, up), 64 threads.
extern "C" __global__ void __launch_bounds__(64)
value_errors(const float* values, i64 n, int heads, int dim, float* out) {
  KVRT_DYNAMIC_SHARED(memory);
  const Tile tile{reinterpret_cast<float*>(memory), dim};
  const i64 first = i64(blockIdx.x) * ERROR_ROWS, rows = n * heads;
  const int count = int(rows - first < ERROR_ROWS ? rows - first : ERROR_ROWS);
  const float4* from = reinterpret_cast<const float4*>(values + first * dim);
  for (int i = threadIdx.x; i < count * dim / 4; i += ERROR_ROWS) {
    const float4 x = from[i];
    float* to = &tile.at(4 * i / dim, 4 * i % dim);
    to[0] = x.x;
    to[1] = x.y;
    to[2] = x.z;
    to[3] = x.w;
  }
  __syncthreads();
  if (int(threadIdx.x) >= count) return;
  const Group group{tile, 1, int(threadIdx.x), 0, dim};
  const i64 row = first + threadIdx.x, side = heads * n;
  float* to = out + row % heads * n + row / heads;
  to[0] = squares(group);
#pragma unroll
  for (int i = 0; i < 3; ++i) to[(i + 1) * side] = squared_error(group, fit(group, 2 << i, ASYM));
}

// A tile of the `count` tokens of a block.
KVRT_INLINE void read_tile(const Tile& tile, const float* source, const i64* tokens, int count, int heads, int head) {
  for (int t = threadIdx.x / WARP; t < count; t += THREADS / WARP) {
    const float* row = source + (tokens[t] * heads + head) * tile.dim;
    for (int c = threadIdx.x % WARP; c < tile.dim; c += WARP) tile.at(t, c) = row[c];
  }
}

// parts (units, dim) of sum x^2 and squared errors at 2, 4 and 8 bits, of the channels in one block. Grid (units).
extern "C" __global__ void __launch_bounds__(256)
block_key_errors(const float* keys, int kv_heads, int dim, const i64* tokens, const i64* firsts, const i64* counts,
                 const i64* heads, float4* parts) {
  KVRT_DYNAMIC_SHARED(memory);
  const Tile tile{reinterpret_cast<float*>(memory), dim};
  const i64 unit = blockIdx.x;
  const int count = int(counts[unit]);
  read_tile(tile, keys, tokens + firsts[unit], count, kv_heads, int(heads[unit]));
  __syncthreads();
  for (int c = threadIdx.x; c < dim; c += THREADS) {
    const Group group{tile, 0, c, 0, count};
    float errors[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) errors[i] = squared_error(group, fit(group, 2 << i, ASYM));
    parts[unit * dim + c] = {squares(group), errors[0], errors[1], errors[2]};
  }
}

// out (kv_heads, dim * 4) f64 = sums of parts (units, dim * 4) over the blocks of a head, in order.
// Grid (kv_heads, dim * 4 / THREADS, up).
extern "C" __global__ void __launch_bounds__(256)
sum_key_errors(const float* parts, const i64* heads, int units, int numbers, double* out) {
  constexpr int AT_ONCE = 16;
  const int i = blockIdx.y * THREADS + threadIdx.x;
  if (i >= numbers) return;
  double total = 0.0;
  for (int first = 0; first < units; first += AT_ONCE) {
    float found[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const int unit = first + j;
      found[j] = unit < units && heads[unit] == i64(blockIdx.x) ? parts[i64(unit) * numbers + i] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) total += double(found[j]);
  }
  out[i64(blockIdx.x) * numbers + i] = total;
}

// Write the runs of blocks, which are zeros: V where blockIdx.y is 0, K where it is 1. units (units, 4) are rows of the
// directory. Grid (units, 2).
extern "C" __global__ void __launch_bounds__(256)
pack_zones(const float* keys, const float* values, int kv_heads, int dim, const i64* tokens, const i64* firsts,
           const i64* heads, const i64* units) {
  KVRT_DYNAMIC_SHARED(memory);
  const Tile tile{reinterpret_cast<float*>(memory), dim};
  const i64 unit = blockIdx.x;
  const bool is_value = blockIdx.y == 0;
  const ZoneBlock block(units + 4 * unit);
  const int count = block.tokens.total();
  read_tile(tile, is_value ? values : keys, tokens + firsts[unit], count, kv_heads, int(heads[unit]));
  __syncthreads();

  // Codes take the place of a tile's numbers.
  const Counts counts = is_value ? block.tokens : block.widths;
  u16* meta = reinterpret_cast<u16*>(block.run + (is_value ? block.value_meta(dim) : block.key_meta(dim)));
  for (int j = counts.of(0) + threadIdx.x; j < counts.total(); j += THREADS) {
    const int bits = counts.bits(j);
    const Group group{tile, is_value, is_value ? j : block.channels[j], 0, is_value ? dim : count};
    const Levels levels = fit(group, bits, ASYM);
    meta[2 * (j - counts.of(0))] = half_bits(levels.scale);
    meta[2 * (j - counts.of(0)) + 1] = half_bits(levels.minimum);
    const Coder coder(levels);
    for (int k = 0; k < group.size; ++k) group.at(k) = __uint_as_float(u32(coder.nearest(group.at(k))));
  }
  __syncthreads();

  // Numbers behind the last token are zeros already.
  const int length = is_value ? dim : block.rows();
  const auto at = [&](int j, int k) -> float& { return is_value ? tile.at(j, k) : tile.at(k, block.channels[j]); };
  u8* codes = block.run + (is_value ? 0 : block.key_codes(dim));
  for (int j = threadIdx.x / WARP; j < counts.total(); j += THREADS / WARP) {
    const int bits = counts.bits(j), filled = is_value ? dim : count;
    u8* row = codes + counts.offset(j, length);
    if (bits == 16) {
      for (int k = threadIdx.x % WARP; k < filled; k += WARP) reinterpret_cast<u16*>(row)[k] = held_half_bits(at(j, k));
      continue;
    }
    const int each = 8 / bits;
    for (int place = threadIdx.x % WARP; place * each < filled; place += WARP) {
      u32 byte = 0;
      for (int i = 0; i < each && place * each + i < filled; ++i)
        byte |= __float_as_uint(at(j, place * each + i)) << i * bits;
      row[place] = u8(byte);
    }
  }
}

// Number k of row j, as `counts` of rows of `length` numbers have it.
KVRT_INLINE float unpacked(const Counts& counts, const u8* codes, const u8* meta, int length, int j, int k) {
  const int bits = counts.bits(j);
  const u8* row = codes + counts.offset(j, length);
  if (bits == 16) return half_value(reinterpret_cast<const u16*>(row)[k]);
  const u16* levels = reinterpret_cast<const u16*>(meta) + 2 * (j - counts.of(0));
  const u32 code = row[k * bits / 8] >> k * bits % 8 & (1u << bits) - 1;
  return fmaf(float(code), half_value(levels[0]), half_value(levels[1]));
}

// out (any, kv_heads, dim) f32: rows rows[u] ... of head heads[u] = K or V of block u; channels that K lacks are zeros.
// Grid (units); no shared memory.
extern "C" __global__ void __launch_bounds__(256)
unpack_zones(const i64* units, const i64* heads, const i64* rows, int is_value, int kv_heads, int dim, float* out) {
  __shared__ int places[256];  // of a channel among those that are kept
  const i64 unit = blockIdx.x;
  const ZoneBlock block(units + 4 * unit);
  const int count = block.tokens.total(), kept = block.widths.total();
  for (int c = threadIdx.x; c < dim; c += THREADS) places[c] = -1;
  __syncthreads();
  for (int j = threadIdx.x; j < kept; j += THREADS) places[block.channels[j]] = j;
  __syncthreads();
  for (int i = threadIdx.x; i < count * dim; i += THREADS) {
    const int t = i / dim, c = i % dim, place = places[c];
    float x = 0.0f;
    if (is_value)
      x = unpacked(block.tokens, block.run, block.run + block.value_meta(dim), dim, t, c);
    else if (place >= 0)
      x = unpacked(block.widths, block.run + block.key_codes(dim), block.run + block.key_meta(dim), block.rows(), place,
                   t);
    out[((rows[unit] + t) * kv_heads + heads[unit]) * dim + c] = x;
  }
}
