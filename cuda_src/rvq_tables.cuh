// What entries of keys are worth to a query: T[tile of heads][block][entry][slot][head] f16, of a slot's book.
//
// A product of all books with all query heads: entries are the wide operand A of mma.m16n8k16, query heads are N, each
// as the sum of two halves. Channels are in an order in which a lane's of two steps are 16 bytes that lie together.
#pragma once
#include "rvq_shape.cuh"

namespace tables {
static constexpr int WARPS = 8, COLUMNS = 32;  // query heads at a time
static constexpr int ENTRIES = 8;              // of each of the four books of a quad: 32 rows of A a warp
static constexpr int STEPS = HEAD_DIM / 32;    // of 32 channels
static constexpr int PITCH = HEAD_DIM * 2 + 64;  // bytes: rows of a quarter of a warp lie in different banks
static constexpr int TASKS = (QUADS + (RAGGED > 0)) * (K_ENTRIES / ENTRIES);

// Where fitted numbers of keys lie in their table.
struct Fitted {
  const u16* entries;
  const float *centre, *inverse;  // (KV heads, HEAD_DIM)

  KVRT_INLINE Fitted(const i64* layer, int kv_heads) {
    entries = reinterpret_cast<const u16*>(ptx::load_early(layer + VIEW_KEY_SIDE + VIEW_TABLE));
    const u16* behind = entries + i64(K_STAGES) * K_ENTRIES * HEAD_DIM;
    centre = reinterpret_cast<const float*>(behind) + K_STAGES * K_ENTRIES;  // behind the norms
    inverse = centre + 2 * kv_heads * HEAD_DIM;
  }
};

// The query heads of a group in tiles of HEADS, filled up with zeros: "columns".
struct Queries {
  const float* q;
  int kv_heads, group, tiles, hadamard;
  float scale;

  KVRT_INLINE int columns() const { return kv_heads * tiles * HEADS; }

  // Column number `column` in the basis of the keys, of which a lane has four channels. By a warp.
  KVRT_INLINE float4 read(int column, int& head) const {
    const int lane = threadIdx.x % WARP, tile = column / HEADS;
    head = min(tile / tiles, kv_heads - 1);
    const int own = tile % tiles * HEADS + column % HEADS;
    HeadState state;
    if (own < group && column < columns() && lane < QUARTERS) {
      const float4 x = reinterpret_cast<const float4*>(q)[(i64(head) * group + own) * QUARTERS + lane];
      state.sums[0] = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
    }
    unrotate(state, hadamard);
    return state.sums[0];
  }

  // Columns first ... as two halves each in shared memory, of numbers divided by `unscale`, powers of two. One CTA
  // writes down what attention wants: `basis` (columns, HEAD_DIM), and `constants`, products with the centres of keys.
  KVRT_INLINE void prepare(u8* shared, int first, const Fitted& fitted, float* basis, float* constants) const {
    const int lane = threadIdx.x % WARP;
    float* unscales = reinterpret_cast<float*>(shared + 2 * COLUMNS * PITCH);
#pragma unroll 1
    for (int i = threadIdx.x / WARP; i < COLUMNS; i += WARPS) {
      const int column = first + i;
      int head;
      float4 x = read(column, head);
      const bool has = lane < QUARTERS;
      const int at = head * QUARTERS + (has ? lane : 0);
      const float4 centre = reinterpret_cast<const float4*>(fitted.centre)[at];
      const float4 inverse = reinterpret_cast<const float4*>(fitted.inverse)[at];
      const float constant = warp_sum(x.x * centre.x + x.y * centre.y + x.z * centre.z + x.w * centre.w);
      if (blockIdx.x == 0 && column < columns()) {
        if (has) reinterpret_cast<float4*>(basis)[column * QUARTERS + lane] = x;
        if (lane == 0) constants[column] = constant;
      }
      x = {x.x * inverse.x, x.y * inverse.y, x.z * inverse.z, x.w * inverse.w};
      const float most = warp_maximum(fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))));
      const int exponent = max(exponent_above(most), -100);
      const float factor = power_of_two(8 - exponent);
      x = {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
      const uint2 high = {ptx::pack_half(x.x, x.y), ptx::pack_half(x.z, x.w)};
      const float2 a = ptx::unpack_half(high.x), b = ptx::unpack_half(high.y);
      const uint2 low = {ptx::pack_half(x.x - a.x, x.y - a.y), ptx::pack_half(x.z - b.x, x.w - b.y)};
      if (has) {
        *reinterpret_cast<uint2*>(shared + i * PITCH + lane * 8) = high;
        *reinterpret_cast<uint2*>(shared + (COLUMNS + i) * PITCH + lane * 8) = low;
      }
      if (lane == 0) unscales[i] = power_of_two(exponent - 8);
    }
  }
};

// A warp's rows: row r of tile u is entry 4 u + r / 4 from `entry` on, of the quad's book r % 4.
struct Rows {
  uint4 a[2][STEPS][2];  // of rows lane / 4 and 8 further
  int quad, entry;

  KVRT_INLINE void read(const u16* entries, int task) {
    const int lane = threadIdx.x % WARP;
    quad = task / (K_ENTRIES / ENTRIES);
    entry = task % (K_ENTRIES / ENTRIES) * ENTRIES;
    const int book = min(4 * quad + lane / 4 % 4, K_STAGES - 1);
    const u16* own = entries + (i64(book) * K_ENTRIES + entry + lane / 16) * HEAD_DIM + lane % 4 * 8;
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
      for (int s = 0; s < STEPS; ++s)
#pragma unroll
        for (int r = 0; r < 2; ++r) a[u][s][r] = ptx::load_stream(own + (4 * u + 2 * r) * HEAD_DIM + 32 * s);
  }

  // Products with COLUMNS columns, to the tables of the tiles from `tile` to `end`.
  KVRT_INLINE void multiply(const u8* shared, u8* tables, int tile, int end) const {
    const int lane = threadIdx.x % WARP;
    const float* unscales = reinterpret_cast<const float*>(shared + 2 * COLUMNS * PITCH);
    const bool in_four = quad < 4 * FOURS, in_two = quad < 4 * FOURS + 2 * TWOS;
    const int block = in_four ? quad / 4 : in_two ? FOURS : FOURS + TWOS + quad - (4 * FOURS + 2 * TWOS);
    const int quads = in_four ? 4 : in_two ? 2 : 1, in_block = quad % quads;
    const bool has_book = 4 * quad + lane / 4 % 4 < K_STAGES;
#pragma unroll 1
    for (int n = 0; n < COLUMNS / 8; ++n) {
      float sums[2][4] = {};
#pragma unroll
      for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
          const u8* place = shared + (part * COLUMNS + 8 * n + lane / 4) * PITCH + s * 64 + lane % 4 * 16;
          const uint4 b = *reinterpret_cast<const uint4*>(place);
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            const uint4 &x = a[u][s][0], &y = a[u][s][1];
            ptx::mma_half(sums[u], x.x, y.x, x.y, y.y, b.x, b.y);
            ptx::mma_half(sums[u], x.z, y.z, x.w, y.w, b.z, b.w);
          }
        }
      // Columns 2 (lane % 4) and the next: half of a tile's heads.
      const int mine = tile + 2 * n + lane % 4 / 2;
      if (mine >= end) continue;  // lanes meet again at the next product
      const float2 unscale = *reinterpret_cast<const float2*>(unscales + 8 * n + 2 * (lane % 4));
      u8* to = tables + (i64(mine) * BLOCKS + block) * TABLE_BYTES + (lane / 4 % 4) * 8 + lane % 2 * 4;
#pragma unroll
      for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float x = has_book ? sums[u][2 * r] * unscale.x : 0, y = has_book ? sums[u][2 * r + 1] * unscale.y : 0;
          u8* row = to + (entry + 4 * u + 2 * r + lane / 16) * ROW_BYTES;
          // A block of one or two quads has them in all slots, for lanes that read at once.
          for (int slot = in_block; slot < 4; slot += quads)
            *reinterpret_cast<u32*>(row + slot * 32) = ptx::pack_half(x, y);
        }
    }
  }
};
}  // namespace tables
