// Encoding by codebooks whose entries are whole heads (rvq): as `seal` of store.cu would, with tensor cores.
//
// An index is defined by float32 sums in a fixed order (vq.cuh). Tensor cores add up otherwise, of residuals rounded to
// halves. So they say which entries may be the nearest: those whose distance is within twice the bound of its error of
// the least one. Mostly there is one; else the few are compared as the definition has it.
//
// Compiled with -D HEAD_DIM.
#include "vq.cuh"

static constexpr int TOKENS = 2 * PAGE_TOKENS;  // of a block: two heads' parts of pages
static constexpr int CHUNK = 128;               // entries that are in shared memory at once, twice
static constexpr int PITCH = HEAD_DIM + 8;      // numbers of a row in shared memory: neither meets in a bank
static constexpr int STEPS = HEAD_DIM / 16;
static constexpr int REST_BYTES = TOKENS * PITCH * 4, CHUNK_BYTES = CHUNK * PITCH * 2;

// The two nearest entries of some, and how far the next is, by distances that are not exact.
struct Near {
  float first = FARTHEST, second = FARTHEST, third = FARTHEST;
  int at = 0, second_at = 0;

  KVRT_INLINE void take(float distance, int index) {
    const bool before = distance < first, between = distance < second;
    third = between ? second : fminf(third, distance);
    second = before ? first : between ? distance : second;
    second_at = before ? at : between ? index : second_at;
    first = before ? distance : first;
    at = before ? index : at;
  }
};

// What 4 lanes of two warps found of a token.
struct Found {
  Near of[8];
};
static_assert(TOKENS * sizeof(Found) <= 2 * CHUNK_BYTES, "they go where entries were");

struct Block {
  float* rest;   // (TOKENS, PITCH): what is left over
  u16* chunks;   // (2, CHUNK, PITCH)
  float* norms;  // of a stage's entries

  KVRT_INLINE Found& found(int t) const { return reinterpret_cast<Found*>(chunks)[t]; }
};

KVRT_INLINE void fetch_chunk(const Block& block, const Books& books, int stage, int chunk) {
  constexpr int PARTS = HEAD_DIM / 8;
  const u16* from = books.entry(stage, 0, chunk * CHUNK);
  u16* to = block.chunks + chunk % 2 * CHUNK * PITCH;
  for (int i = threadIdx.x; i < CHUNK * PARTS; i += THREADS)
    ptx::copy_async16(to + i / PARTS * PITCH + i % PARTS * 8, from + i * 8);
  ptx::commit_copies();
}

// Residuals of 32 tokens as A fragments.
KVRT_INLINE void load_tokens(u32 (&a)[2][STEPS][4], const float* rest) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* place = rest + (16 * m + lane / 4 + 8 * (i & 1)) * PITCH + 16 * s + 8 * (i >> 1) + lane % 4 * 2;
        const float2 x = *reinterpret_cast<const float2*>(place);
        a[m][s][i] = ptx::pack_half(x.x, x.y);
      }
}

// Distances of 32 tokens and 16 entries of a chunk, taken up.
KVRT_INLINE void look_at(Near (&nearest)[2][2], const u32 (&a)[2][STEPS][4], const u16* entries, const float* norms,
                         int first) {
  const int lane = threadIdx.x % WARP, col = lane % 4 * 2;
  float sums[2][2][4] = {};
  // Four matrices: 8 entries, 8 channels each.
  const u16* row = entries + lane % 8 * PITCH + lane / 8 * 8;
#pragma unroll
  for (int s = 0; s < STEPS; s += 2)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      u32 b[4];
      ptx::load_matrix4(b, row + n * 8 * PITCH + s * 16);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const u32(&x)[4] = a[m][s], (&y)[4] = a[m][s + 1];
        ptx::mma_half(sums[n][m], x[0], x[1], x[2], x[3], b[0], b[1]);
        ptx::mma_half(sums[n][m], y[0], y[1], y[2], y[3], b[2], b[3]);
      }
    }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int index = first + 8 * n + col;
    const float2 norm = *reinterpret_cast<const float2*>(norms + index);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        nearest[m][r].take(norm.x - sums[n][m][2 * r], index);
        nearest[m][r].take(norm.y - sums[n][m][2 * r + 1], index + 1);
      }
  }
}

// The distance as it is defined.
KVRT_INLINE float distance_of(const float* rest, const Books& books, int stage, int index, float norm) {
  const uint4* entry = reinterpret_cast<const uint4*>(books.entry(stage, 0, index));
  float sum = 0.0f;
  uint4 words[HEAD_DIM / 8];  // all loads before the sums, each of which waits for the one before
#pragma unroll
  for (int part = 0; part < HEAD_DIM / 8; ++part) words[part] = __ldg(entry + part);
#pragma unroll
  for (int part = 0; part < HEAD_DIM / 8; ++part) {
    const u32 pairs[4] = {words[part].x, words[part].y, words[part].z, words[part].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 e = ptx::unpack_half(pairs[i]);
      const float* x = rest + part * 8 + i * 2;
      sum = fmaf(x[1], e.y, fmaf(x[0], e.x, sum));
    }
  }
  return __fadd_rn(norm, -sum);
}

// The nearest entry of a token, if those that may be it are known; else -1. `bound`: twice that of the error.
KVRT_INLINE int decide(const Found& found, const float* rest, const Books& books, int stage, const float* norms,
                       float bound) {
  float least = found.of[0].first;
#pragma unroll
  for (int i = 1; i < 8; ++i) least = fminf(least, found.of[i].first);
  const float limit = least + bound;
  if (!(fabsf(limit) < 1e30f)) return -1;  // numbers beyond halves make infinite distances, of either sign
  int near = 0, index = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Near& one = found.of[i];
    if (one.third <= limit) return -1;
    near += (one.first <= limit) + (one.second <= limit);
    if (one.first <= limit) index = one.at;
  }
  if (near == 1) return index;
  Nearest nearest;
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    const Near& one = found.of[i / 2];
    const int at = i % 2 ? one.second_at : one.at;
    if ((i % 2 ? one.second : one.first) > limit) continue;
    const float distance = distance_of(rest, books, stage, at, norms[at]);
    if (distance < nearest.distance || (distance == nearest.distance && at < nearest.index)) {
      nearest.distance = distance;
      nearest.index = at;
    }
  }
  return nearest.index;
}

// The same by a warp, of all entries.
KVRT_INLINE int search(const float* rest, const Books& books, int stage, const float* norms) {
  Nearest mine;
  for (int index = threadIdx.x % WARP; index < 1 << books.bits; index += WARP)
    mine.take(distance_of(rest, books, stage, index, norms[index]), index);
  for (int way = 1; way < WARP; way *= 2) {
    const float distance = __shfl_xor_sync(ALL_LANES, mine.distance, way);
    const int index = __shfl_xor_sync(ALL_LANES, mine.index, way);
    if (distance < mine.distance || (distance == mine.distance && index < mine.index)) {
      mine.distance = distance;
      mine.index = index;
    }
  }
  return mine.index;
}

KVRT_INLINE float warp_largest(float x) {
  for (int way = 1; way < WARP; way *= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, way));
  return x;
}
KVRT_INLINE float warp_total(float x) {
  for (int way = 1; way < WARP; way *= 2) x += __shfl_xor_sync(ALL_LANES, x, way);
  return x;
}

// Encode one side of the pages 2 i and 2 i + 1 behind first_page, `count` in all, of one head; arguments are those of
// `seal` of store.cu. Grid (heads * count / 2, up, layers), 256 threads, SHARED_BYTES; the head goes slowest.
extern "C" __global__ void __launch_bounds__(256, 1)
encode_heads(const i64* layer, int is_value, const i64* pages, int first_page, int count, int tail_first, int tail_slot,
             const float* fresh, int new_start, int new_tokens) {
  KVRT_DYNAMIC_SHARED(memory);
  __shared__ int indices[TOKENS];
  layer += i64(blockIdx.y) * VIEW_LAYER_SETTINGS;
  const Block block{reinterpret_cast<float*>(memory), reinterpret_cast<u16*>(memory + REST_BYTES),
                    reinterpret_cast<float*>(memory + REST_BYTES + 2 * CHUNK_BYTES)};
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, pairs = (count + 1) / 2;
  const int head = int(blockIdx.x) / pairs, first = int(blockIdx.x) % pairs * 2;
  const i64* side = layer + (is_value ? VIEW_VALUE_SIDE : VIEW_KEY_SIDE);
  // Each warp has 16 tokens, of one half.
  const int half = warp / 4;
  float squares[16];  // of the norms of its tokens
  const int page = first_page + min(first + half, count - 1);
  u8* base = reinterpret_cast<u8*>(pages[page] + layer[VIEW_LAYER_OFFSET]);
  const Part part{side, is_value, head, int(layer[VIEW_HEADS]), base + head * layer[VIEW_RUN_BYTES], base};
  const Books books(part, HEAD_DIM);
  {
    const Source source(layer, is_value, page, tail_first, tail_slot, fresh, new_start);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int t = 16 * warp + i;
      float sum = 0;
      for (int c = lane; c < HEAD_DIM; c += WARP) {
        const float x = books.inwards(source.at(head, t % PAGE_TOKENS, c), c);
        block.rest[t * PITCH + c] = x;
        sum += x * x;
      }
      squares[i] = warp_total(sum);
    }
  }
  const int entries = 1 << books.bits, chunks = entries / CHUNK, further = books.bits - 8;
  u8* run = part.codes();
  for (int stage = 0; stage < books.stages; ++stage) {
    __syncthreads();  // of residuals, and what was found of the stage before
    fetch_chunk(block, books, stage, 0);
    float largest = 0;
    for (int i = threadIdx.x; i < entries; i += THREADS) block.norms[i] = __ldg(books.norms_of(stage, 0) + i);
    u32 a[2][STEPS][4];
    load_tokens(a, block.rest + warp / 2 * 32 * PITCH);
    Near nearest[2][2];
    for (int chunk = 0; chunk < chunks; ++chunk) {
      if (chunk + 1 < chunks) fetch_chunk(block, books, stage, chunk + 1);
      if (chunk + 1 < chunks)
        ptx::wait_copies<1>();
      else
        ptx::wait_copies<0>();
      __syncthreads();
      const u16* here = block.chunks + chunk % 2 * CHUNK * PITCH;
#pragma unroll 1
      for (int n = warp % 2 * CHUNK / 2; n < (warp % 2 + 1) * CHUNK / 2; n += 16)
        look_at(nearest, a, here + n * PITCH, block.norms, chunk * CHUNK + n);
      __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        block.found(warp / 2 * 32 + 16 * m + 8 * r + lane / 4).of[warp % 2 * 4 + lane % 4] = nearest[m][r];
    for (int i = lane; i < entries; i += WARP) largest = fmaxf(largest, block.norms[i]);
    largest = sqrtf(2.0f * warp_largest(largest));
    __syncthreads();

    // Lane i < 16 decides for token 16 warp + i. A half is off by 2^-11 of a number or by 2^-25; sums in float32, in
    // either order, by far less than a sixteenth of that, but that a distance is rounded, too.
    float square = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) square = lane == i ? squares[i] : square;
    const float* mine = block.rest + (16 * warp + lane % 16) * PITCH;
    int index = 0;
    if (lane < 16) {
      const float norm = sqrtf(square);
      const float error = norm * 1.0625f * 0x1p-10f + HEAD_DIM * 0x1p-24f + largest * 0x1p-22f;
      const float bound = norm < 3e4f ? largest * error : 1e38f;
      index = decide(block.found(16 * warp + lane), mine, books, stage, block.norms, bound);
    }
    for (u32 open = __ballot_sync(ALL_LANES, index < 0); open; open &= open - 1) {
      const int from = __ffs(int(open)) - 1;
      const int right = search(block.rest + (16 * warp + from) * PITCH, books, stage, block.norms);
      if (lane == from) index = right;
    }
    if (lane < 16) indices[16 * warp + lane] = index;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int t = 16 * warp + i;
      const u16* entry = books.entry(stage, 0, indices[t]);
      float sum = 0;
      for (int c = lane * 2; c < HEAD_DIM; c += 2 * WARP) {
        const float2 e = ptx::unpack_half(__ldg(reinterpret_cast<const u32*>(entry + c)));
        float2& x = *reinterpret_cast<float2*>(block.rest + t * PITCH + c);
        x = {__fadd_rn(x.x, -e.x), __fadd_rn(x.y, -e.y)};
        sum += x.x * x.x + x.y * x.y;
      }
      squares[i] = warp_total(sum);
    }
    // Eight lanes have eight tokens of a byte each, and of a few bytes together.
    const int t = 16 * warp % PAGE_TOKENS + lane;
    u32 word = lane < 16 ? u32(index) >> 8 << (further * (lane % 8)) : 0;
    for (int way = 1; way < 8; way *= 2) word |= __shfl_xor_sync(ALL_LANES, word, way);
    if (first + half < count && lane < 16) {  // the last block of a head may have one page alone
      const HeadPlaces places(books.stages, books.bits, is_value, stage, t / 8);
      run[places.low + t % 8] = u8(index);
      if (lane % 8 < further) run[places.further + lane % 8] = u8(word >> lane % 8 * 8);
    }
  }
}
