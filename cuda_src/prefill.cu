// Attention of a whole prompt over its own keys and values: exact, causal, tile by tile.
//
// FlashAttention-2 (arXiv 2307.08691): a block holds 128 query rows of one head and goes over the keys it sees in
// tiles; scores never leave registers. One variant a -DHEAD_DIM (64..256 in steps of 16). Three ways to need fewer
// instructions beside the tensor cores' own:
// - the reference that scores are taken against (the row's maximum, in the paper) is only moved when a score passes
//   it by 2^SLACK: both give the same quotient, and the outputs are nearly never scaled anew;
// - the weights' sums come from a product with ones, a column block more, instead of from additions;
// - masks are only applied to tiles that the diagonal or the window's edge crosses.
#include "common.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

namespace {
constexpr int DIM = HEAD_DIM;
static_assert(DIM % 16 == 0 && DIM >= 64 && DIM <= 256, "HEAD_DIM: a multiple of 16 from 64 to 256");

// The launch: grid (heads, ceil(n / ROWS)), block THREADS, SHARED bytes of dynamic shared memory.
// Two bands of 16 rows a warp use what they load twice; from 176 dims on they would not fit in registers.
constexpr int BANDS = DIM < 176 ? 2 : 1;
constexpr int WARPS = 8 / BANDS;
constexpr int ROWS = 16 * BANDS * WARPS;  // 128 for all
constexpr int THREADS = WARP * WARPS;     // 128, from 176 dims on 256
// Blocks that share a multiprocessor: while one is at its exponentials, another has the tensor cores.
constexpr int BLOCKS = DIM == 64 ? 3 : BANDS;
// Keys of a tile: as many as registers hold without spills, and shared memory for BLOCKS of them (at 227 KiB).
// -DPREFILL_KEYS=32 is for devices with less, as sm_80: at 128 dims two blocks still fit in 164 KiB.
#ifdef PREFILL_KEYS
constexpr int KEYS = PREFILL_KEYS;
#else
constexpr int KEYS = DIM == 64 ? 48 : DIM > 128 && BANDS == 2 ? 32 : 64;
#endif
// One band's queries live in registers; those of two are read from shared memory for every tile.
constexpr bool QUERIES_HELD = BANDS == 1;

constexpr int CHUNKS = DIM / 8;           // of 16 bytes, in a row
constexpr int PITCH = (CHUNKS + 1) * 16;  // bytes from row to row: odd in chunks, so that 8 rows meet all banks
constexpr int TILE = KEYS * PITCH;        // bytes
constexpr int QUERIES = ROWS * PITCH;     // bytes
constexpr int TILES = 4 * TILE;           // keys and values, twice
// 64 dims: 46080, 80: 67584, 96: 79872, 112: 92160, 128: 104448, 192: 102400, 256: 135168.
constexpr int SHARED = QUERIES_HELD ? (TILES > QUERIES ? TILES : QUERIES) : TILES + QUERIES;
static_assert(KEYS % 16 == 0 && KEYS <= ROWS && SHARED <= 163 * 1024, "tiles do not fit");

constexpr int STEPS = DIM / 16;
constexpr float SLACK = 8.0f;      // weights reach 2^8: far from the end of f16
constexpr float NOTHING = -1e30f;  // below any score, yet finite: no infinity is subtracted from another
constexpr u32 ONES = 0x3C003C00u;  // two halves of 1
constexpr float LOG2_E = 1.4426950408889634f;

struct Lane {
  int row, column;     // of a 16 x 8 result: this row and row + 8; this column and the next
  int plain, crossed;  // byte offsets of ldmatrix: (row blocks first) for queries and values, (columns first) for keys
};

KVRT_INLINE Lane this_lane() {
  const int lane = threadIdx.x % WARP;
  return {lane / 4, lane % 4 * 2, lane % 16 * PITCH + lane / 16 * 16,
          (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16};
}

// Start to copy rows begin .. begin + COUNT - 1 of a matrix to shared memory; rows from `end` on become zeros.
template <int COUNT>
KVRT_INLINE void copy_rows(unsigned char* target, const u16* source, i64 stride, int begin, int end) {
  constexpr int ACROSS = CHUNKS & -CHUNKS;  // threads side by side in a row: each has its column and steps down
  constexpr int DOWN = THREADS / ACROSS;
  const int first = threadIdx.x / ACROSS, chunk = threadIdx.x % ACROSS;
  if (COUNT % DOWN != 0 && first >= COUNT) return;
  unsigned char* to = target + first * PITCH + chunk * 16;
  if (begin + COUNT <= end) {
    const u16* from = source + (begin + first) * stride + chunk * 8;
#pragma unroll
    for (int row = 0; row < COUNT; row += DOWN, from += DOWN * stride)
#pragma unroll
      for (int i = 0; i < CHUNKS; i += ACROSS) ptx::copy_async16(to + row * PITCH + i * 16, from + i * 8);
    return;
  }
#pragma unroll 1
  for (int row = first; row < COUNT; row += DOWN, to += DOWN * PITCH) {
    const bool inside = begin + row < end;
    const u16* from = source + (inside ? begin + row : end - 1) * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < CHUNKS; i += ACROSS) ptx::copy_async16(to + i * 16, from + i * 8, inside ? 16 : 0);
  }
}

// The rows of a warp: their queries (if held), outputs, sums of weights, and the reference of each row.
struct Rows {
  float out[BANDS][2 * STEPS][4];
  float sums[BANDS][4];
  float reference[BANDS][2];  // in powers of 2
  u32 queries[QUERIES_HELD ? STEPS : 1][4];
};

using Scores = float[BANDS][KEYS / 8][4];

// scores (rows x KEYS) = queries keys^T.
KVRT_INLINE void score(Scores& scores, const Rows& rows, const unsigned char* queries, const unsigned char* keys) {
#pragma unroll
  for (int band = 0; band < BANDS; ++band)
#pragma unroll
    for (int i = 0; i < KEYS / 8 * 4; ++i) scores[band][i / 4][i % 4] = 0.0f;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    u32 a[BANDS][4];
#pragma unroll
    for (int band = 0; band < BANDS; ++band) {
      if constexpr (QUERIES_HELD) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[band][i] = rows.queries[step][i];
      } else {
        ptx::load_matrix4(a[band], queries + band * 16 * PITCH + step * 32);
      }
    }
#pragma unroll
    for (int j = 0; j < KEYS / 16; ++j) {
      u32 b[4];
      ptx::load_matrix4(b, keys + j * 16 * PITCH + step * 32);
#pragma unroll
      for (int band = 0; band < BANDS; ++band) {
        const u32* q = a[band];
        ptx::mma_half(scores[band][2 * j], q[0], q[1], q[2], q[3], b[0], b[1]);
        ptx::mma_half(scores[band][2 * j + 1], q[0], q[1], q[2], q[3], b[2], b[3]);
      }
    }
  }
}

// Scores of keys that a row does not see become -infinity. `key` and `position` are of the lane's first score.
KVRT_INLINE void mask(Scores& scores, int key, int position, int seen) {
#pragma unroll
  for (int band = 0; band < BANDS; ++band)
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int behind = position + band * 16 + i / 2 * 8 - (key + j * 8 + i % 2);
        if (behind < 0 || behind >= seen) scores[band][j][i] = __uint_as_float(0xFF800000u);
      }
}

// Move the references, and what was summed against them, where a score is too far above.
KVRT_INLINE void move_references(Rows& rows, const Scores& scores, float scale) {
  float top[BANDS][2];
  bool above = false;
#pragma unroll
  for (int i = 0; i < 2 * BANDS; ++i) {
    const auto& band = scores[i / 2];
    float most = fmaxf(band[0][i % 2 * 2], band[0][i % 2 * 2 + 1]);
#pragma unroll
    for (int j = 1; j < KEYS / 8; ++j) most = fmaxf(most, fmaxf(band[j][i % 2 * 2], band[j][i % 2 * 2 + 1]));
    top[i / 2][i % 2] = most * scale;
    above |= most * scale > rows.reference[i / 2][i % 2] + SLACK;
  }
  if (!__any_sync(ALL_LANES, above)) return;
#pragma unroll
  for (int band = 0; band < BANDS; ++band)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = top[band][half];
      most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
      most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
      most = fmaxf(most, rows.reference[band][half]);
      const float factor = ptx::exp2(rows.reference[band][half] - most);
      rows.reference[band][half] = most;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        rows.sums[band][2 * half + i] *= factor;
#pragma unroll
        for (int j = 0; j < 2 * STEPS; ++j) rows.out[band][j][2 * half + i] *= factor;
      }
    }
}

// out += weights values, sums += weights; weights = 2^(scores scale - reference), 16 keys at a time.
KVRT_INLINE void gather(Rows& rows, const Scores& scores, const unsigned char* values, float scale) {
#pragma unroll
  for (int j = 0; j < KEYS / 16; ++j) {
    u32 p[BANDS][4];
#pragma unroll
    for (int band = 0; band < BANDS; ++band) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // The results' layout is that of the next product's left side.
        const float* pair = &scores[band][2 * j + i / 2][i % 2 * 2];
        const float reference = rows.reference[band][i % 2];
        p[band][i] = ptx::pack_half(ptx::exp2(pair[0] * scale - reference), ptx::exp2(pair[1] * scale - reference));
      }
      ptx::mma_half(rows.sums[band], p[band][0], p[band][1], p[band][2], p[band][3], ONES, ONES);
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32 b[4];
      ptx::load_matrix4_transposed(b, values + j * 16 * PITCH + step * 32);
#pragma unroll
      for (int band = 0; band < BANDS; ++band) {
        const u32* a = p[band];
        ptx::mma_half(rows.out[band][2 * step], a[0], a[1], a[2], a[3], b[0], b[1]);
        ptx::mma_half(rows.out[band][2 * step + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
  }
}
}  // namespace

// out (n, heads, DIM) f32 = softmax(query keys^T scale) values, row by row over the keys that a query sees.
//
// query (n, heads, DIM) f16; keys, values (m, heads / group, DIM) f16; head h reads key head h / group. The queries
// are those of the last n of the m keys: query i sees keys up to m - n + i, with window > 0 only the last `window`
// of them. *_row: elements from token to token; *_head: from key head to key head; heads of queries and outputs lie
// side by side. Rows of halves start at 16 bytes (strides are multiples of 8), those of out at 8. scale > 0.
// A NaN shows in what it reaches; one in a value may also show in rows of its tile that don't see it (0 NaN = NaN).
// Grid (heads, ceil(n / 128)): blocks of late queries, which see most keys, come first, and the heads of a group
// run side by side over the same keys. Block THREADS, dynamic shared memory SHARED bytes (above).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    prefill(const u16* query, const u16* keys, const u16* values, float* out, int n, int m, int group, int window,
            float scale, i64 query_row, i64 key_row, i64 key_head, i64 value_row, i64 value_head, i64 out_row) {
  KVRT_DYNAMIC_SHARED(shared);
  const Lane lane = this_lane();
  const int warp = threadIdx.x / WARP;
  const int first = (gridDim.y - 1 - blockIdx.y) * ROWS;  // query of the block's first row
  const int seen = window > 0 ? window : m;
  const int key_end = m - n + min(first + ROWS, n);
  const int key_begin = max(0, m - n + first - seen + 1) / KEYS * KEYS;
  // Of the warp: its first query, and the positions of its first and last.
  const int mine = first + warp * 16 * BANDS;
  const int low = m - n + mine, high = low + 16 * BANDS - 1;
  const int head = blockIdx.x;
  query += head * DIM;
  keys += head / group * key_head;
  values += head / group * value_head;
  scale *= LOG2_E;

  unsigned char* const tiles = shared + (QUERIES_HELD ? 0 : QUERIES);
  const unsigned char* const own = shared + warp * 16 * BANDS * PITCH + lane.plain;
  Rows rows;
#pragma unroll
  for (int band = 0; band < BANDS; ++band) {
#pragma unroll
    for (int i = 0; i < 8 * STEPS; ++i) rows.out[band][i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) rows.sums[band][i] = 0.0f;
    rows.reference[band][0] = rows.reference[band][1] = NOTHING;
  }

  copy_rows<ROWS>(shared, query, query_row, first, n);
  if constexpr (QUERIES_HELD) {
    ptx::commit_copies();
    ptx::wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) ptx::load_matrix4(rows.queries[step], own + step * 32);
    __syncthreads();  // the first tiles come where the queries were
  }
  copy_rows<KEYS>(tiles, keys, key_row, key_begin, m);
  copy_rows<KEYS>(tiles + TILE, values, value_row, key_begin, m);
  ptx::commit_copies();

  int now = 0;  // the pair of tiles to use, in bytes
  for (int begin = key_begin; begin < key_end; begin += KEYS, now = 2 * TILE - now) {
    ptx::wait_copies<0>();
    __syncthreads();  // all copies of this pair are there, and all warps are done with the other
    if (begin + KEYS < key_end) {
      unsigned char* const next = tiles + 2 * TILE - now;
      copy_rows<KEYS>(next, keys, key_row, begin + KEYS, m);
      copy_rows<KEYS>(next + TILE, values, value_row, begin + KEYS, m);
      ptx::commit_copies();
    }
    if (mine >= n || begin > high || begin + KEYS <= low - seen + 1) continue;  // no row of the warp sees a key
    Scores scores;
    score(scores, rows, own, tiles + now + lane.crossed);
    if (begin + KEYS - 1 > low || begin <= high - seen)
      mask(scores, begin + lane.column, low + lane.row, seen);
    move_references(rows, scores, scale);
    gather(rows, scores, tiles + now + TILE + lane.plain, scale);
  }

#pragma unroll
  for (int band = 0; band < BANDS; ++band)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = mine + band * 16 + half * 8 + lane.row;
      if (row >= n) continue;
      const float inverse = 1.0f / rows.sums[band][2 * half];
      float* to = out + row * out_row + head * DIM + lane.column;
#pragma unroll
      for (int j = 0; j < 2 * STEPS; ++j) {
        const float* pair = &rows.out[band][j][2 * half];
        *reinterpret_cast<float2*>(to + 8 * j) = {pair[0] * inverse, pair[1] * inverse};
      }
    }
}
