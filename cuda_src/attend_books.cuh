// Pages of product-residual codes: scores are sums of table entries, values are gathered from codebooks.
//
// A group of 8 channels has STAGES books of 256 entries; a code is a byte. kvrt/kvstore/codecs/vq_codes.py has the
// order of bytes: a lane's follow each other in the order in which it wants them here.
#pragma once
#include "attend_softmax.cuh"

static constexpr int HEADS = 4;  // query heads of a CTA
static constexpr int ENTRIES = 256, ENTRY_BYTES = 16;
static constexpr int GROUPS = HEAD_DIM / 8, K_BOOKS = GROUPS * K_STAGES, V_BOOKS = GROUPS * V_STAGES;
// The table of scores comes in blocks of 16 books, the last of which may have 8: a row is what an entry of each book
// brings to the scores of all heads, four halves a book. So 16 lanes that want different books do not meet in a bank.
static constexpr int BLOCK_BOOKS = 16, BLOCKS = (K_BOOKS + BLOCK_BOOKS - 1) / BLOCK_BOOKS;
static constexpr int BLOCK_BYTES = ENTRIES * BLOCK_BOOKS * 8;
static constexpr int SCORES_BYTES = K_BOOKS * ENTRIES * 8, VALUES_BYTES = V_BOOKS * ENTRIES * ENTRY_BYTES;
static_assert(HEAD_DIM % 64 == 0, "a lane's codes are whole words");

KVRT_INLINE constexpr int books_of(int block) {
  return K_BOOKS - block * BLOCK_BOOKS < BLOCK_BOOKS ? K_BOOKS - block * BLOCK_BOOKS : BLOCK_BOOKS;
}

// A lane's codes of one side of a page.
template <int BOOKS>
struct PageCodes {
  static constexpr int COUNT = BOOKS / 8;
  uint4 words[COUNT];

  KVRT_INLINE void load(const u8* codes) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) words[i] = ptx::load_stream(codes + (i * WARP + threadIdx.x % WARP) * 16);
  }
  // Code number i of the lane.
  KVRT_INLINE u32 code(int i) const {
    const uint4& four = words[i / 16];
    const u32 word = i / 4 % 4 == 0 ? four.x : i / 4 % 4 == 1 ? four.y : i / 4 % 4 == 2 ? four.z : four.w;
    return ptx::prmt(word, 0, 0x4440 + i % 4);
  }
};

// Scores of 64 keys: of lane l those of the tokens 8 (l % 4) + l / 4 and 32 further.
//
// Lane l looks for token l / 4 of 8. What it finds of two books are the four registers of A: rows l / 4 are the heads 0
// and 1 of a token, rows 8 further the heads 2 and 3, along the depth are the books. B picks the columns that belong to
// those 8 tokens, so that the tensor cores add up all books of a token and head, in f32.
struct BookScores {
  ptx::Shared places[4], last_places[2];  // of the lane's book in the first row, step by step; in rows of 8 books
  u32 picks[4];                           // B, for each 8 of 32 tokens

  KVRT_INLINE explicit BookScores(const u8* table) {
    const int lane = threadIdx.x % WARP, row = lane / 4, col = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) places[i] = ptx::shared_address(table + (4 * ((i + row) % 4) + col) * 8);
#pragma unroll
    for (int i = 0; i < 2; ++i) last_places[i] = ptx::shared_address(table + (4 * ((i + row) % 2) + col) * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) picks[i] = row / 2 != i ? 0 : row % 2 ? 0x3C000000u : 0x3C00u;
  }

  KVRT_INLINE void add(float (&scores)[2][4], const PageCodes<K_BOOKS>& codes) const {
    constexpr int STEPS = K_BOOKS / 4;
#pragma unroll
    for (int octet = 0; octet < 8; ++octet)
#pragma unroll
      for (int step = 0; step < STEPS; step += 2) {
        const int at = octet * STEPS + step;
        const uint2 a = entry(codes.code(at), step), b = entry(codes.code(at + 1), step + 1);
        ptx::mma_half(scores[octet / 4], a.x, a.y, b.x, b.y, picks[octet % 4], picks[octet % 4]);
      }
  }

 private:
  KVRT_INLINE uint2 entry(u32 code, int step) const {
    const int block = step / 4, books = books_of(block);
    const ptx::Shared place = books == BLOCK_BOOKS ? places[step % 4] : last_places[step % 2];
    return ptx::load_shared8(place + code * (books * 8) + block * BLOCK_BYTES);
  }
};

// What a CTA needs of its head's keys beside their books, in shared memory.
struct KeyUnits {
  int* order;      // (HEAD_DIM,): channels, group by group
  float* inverse;  // (HEAD_DIM,): what codes of a channel are multiplied by

  static constexpr int BYTES = HEAD_DIM * 8;
  KVRT_INLINE explicit KeyUnits(u8* place)
      : order(reinterpret_cast<int*>(place)), inverse(reinterpret_cast<float*>(place) + HEAD_DIM) {}
};

// The table of scores, of the head's key books and the queries (HEADS, QUERY_PITCH) in shared memory. A thread has one
// book of a block: the first blocks are asked for before anything is waited for.
struct ScoreTable {
#if __CUDA_ARCH__ >= 1000
  static constexpr int MOST_EARLY = 1;  // two would take more registers than there are
#else
  static constexpr int MOST_EARLY = 2;
#endif
  static constexpr int EARLY = BLOCKS < MOST_EARLY ? BLOCKS : MOST_EARLY, EACH = BLOCK_BOOKS * ENTRIES / (WARPS * WARP);
  uint4 entries[EARLY][EACH];
  const u8* books;  // of the head's set
  int sets;         // that a stage has

  KVRT_INLINE ScoreTable(const u8* books, int sets, bool wanted) : books(books), sets(sets) {
    if (!wanted) return;
#pragma unroll
    for (int block = 0; block < EARLY; ++block) load(block, entries[block]);
  }

  KVRT_INLINE void write(u8* table, const float* queries, const KeyUnits& units) const {
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      if (block < EARLY) {
        make(block, entries[block], table, queries, units);
      } else {
        uint4 more[EACH];
        load(block, more);
        make(block, more, table, queries, units);
      }
    }
  }

 private:
  static KVRT_INLINE int book_in(int block) { return threadIdx.x % books_of(block); }
  static KVRT_INLINE int entry_at(int block, int i) {
    return i * (WARPS * WARP / books_of(block)) + threadIdx.x / books_of(block);
  }
  static KVRT_INLINE int count(int block) { return EACH * books_of(block) / BLOCK_BOOKS; }

  KVRT_INLINE void load(int block, uint4 (&to)[EACH]) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (i < count(block)) {
        const int book = block * BLOCK_BOOKS + book_in(block), place = book + book / GROUPS * GROUPS * (sets - 1);
        to[i] = ptx::load_stream(books + (i64(place) * ENTRIES + entry_at(block, i)) * ENTRY_BYTES);
      }
  }

  static KVRT_INLINE void make(int block, const uint4 (&from)[EACH], u8* table, const float* queries,
                               const KeyUnits& units) {
    const int group = (block * BLOCK_BOOKS + book_in(block)) % GROUPS;
    float q[HEADS][8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const int channel = units.order[8 * group + c];
      const float factor = units.inverse[channel];
#pragma unroll
      for (int h = 0; h < HEADS; ++h) q[h][c] = queries[h * QUERY_PITCH + channel] * factor;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (i >= count(block)) continue;
      const u32 words[4] = {from[i].x, from[i].y, from[i].z, from[i].w};
      float sums[HEADS] = {};
#pragma unroll
      for (int c = 0; c < 8; c += 2) {
        const float2 x = ptx::unpack_half(words[c / 2]);
#pragma unroll
        for (int h = 0; h < HEADS; ++h) sums[h] = fmaf(x.y, q[h][c + 1], fmaf(x.x, q[h][c], sums[h]));
      }
      const uint2 halves = {ptx::pack_half(sums[0], sums[1]), ptx::pack_half(sums[2], sums[3])};
      const int at = block * BLOCK_BYTES + (entry_at(block, i) * books_of(block) + book_in(block)) * 8;
      *reinterpret_cast<uint2*>(table + at) = halves;
    }
  }
};

// The channel of row `row` of tile s of weighted sums: 8 groups are four tiles, of which each has a pair of channels of
// all groups.
KVRT_INLINE constexpr int channel_of_sum(int s, int row) {
  return 64 * (s / 4) + 8 * (row / 2) + 2 * (s % 4) + row % 2;
}

// The running softmax of a warp, which has up to 64 tokens at a time, and HEADS query heads.
struct HeadSoftmax {
  static constexpr int ROW = 16, BYTES = 64 * ROW;  // of weights in shared memory: halves of a token, and as many zeros
  float peak[HEADS] = {NOTHING, NOTHING, NOTHING, NOTHING}, total[HEADS] = {};  // total: of the lane's tokens
  float sums[TILES][4] = {};  // rows lane / 4 and 8 further (`channel_of_sum`), heads 2 (lane % 4) and the next, if any
  u8* weights;                // (64, ROW) of the warp

  KVRT_INLINE explicit HeadSoftmax(u8* weights) : weights(weights) {
    for (int t = threadIdx.x % WARP; t < 64; t += WARP) *reinterpret_cast<uint4*>(weights + t * ROW) = {0, 0, 0, 0};
    __syncwarp();
  }

  // Take up scores of COUNT tokens of each lane, scores[i] being those of the token first + APART * i, of which those
  // from `low` to `high` - 1 are seen.
  template <int COUNT, int APART>
  KVRT_INLINE void step(float (&scores)[COUNT][4], int first, int low, int high) {
    if (low > 0 || high < COUNT * 32) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int h = 0; h < HEADS; ++h)
          if (first + APART * i < low || first + APART * i >= high) scores[i][h] = NOTHING;
    }
    // The softmax is right with any peak: a maximum is taken where weights have become too large, first of all.
    float found[COUNT][HEADS];
    weigh(found, scores);
    float top = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
      for (int h = 0; h < HEADS; ++h) top = fmaxf(top, found[i][h]);
    if (__any_sync(ALL_LANES, !(top < MOST_WEIGHT))) {
      raise(scores);
      weigh(found, scores);
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
      for (int h = 0; h < HEADS; ++h) total[h] += found[i][h];
      const uint2 halves = {ptx::pack_half(found[i][0], found[i][1]), ptx::pack_half(found[i][2], found[i][3])};
      *reinterpret_cast<uint2*>(weights + (first + APART * i) * ROW) = halves;
    }
    __syncwarp();
  }

  // The weights of tokens 32 half ... as B fragments: of 16 tokens each, low and high.
  KVRT_INLINE void read(u32 (&to)[4], int half) const {
    ptx::load_matrix4_transposed(to, weights + (32 * half + threadIdx.x % WARP) * ROW);
  }

  // In the form of `write_state`.
  KVRT_INLINE void write(float* place, int heads) {
    const int lane = threadIdx.x % WARP, row = lane / 4, col = lane % 4;
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      total[h] = warp_sum(total[h]);
      if (lane == 0 && h < heads) {
        place[8 * PITCH + 2 * h] = peak[h];
        place[8 * PITCH + 2 * h + 1] = total[h];
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = 2 * col + h;
      if (head >= heads) continue;
#pragma unroll
      for (int s = 0; s < TILES; ++s) {
        place[head * PITCH + channel_of_sum(s, row)] = sums[s][h];
        place[head * PITCH + channel_of_sum(s, 8 + row)] = sums[s][2 + h];
      }
    }
  }

 private:
  template <int COUNT>
  KVRT_INLINE void weigh(float (&to)[COUNT][HEADS], const float (&scores)[COUNT][4]) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
      for (int h = 0; h < HEADS; ++h) to[i][h] = ptx::exp2(scores[i][h] + (WEIGHT_BITS - peak[h]));
  }

  template <int COUNT>
  KVRT_INLINE void raise(const float (&scores)[COUNT][4]) {
    float shrink[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      float top = peak[h];
#pragma unroll
      for (int i = 0; i < COUNT; ++i) top = fmaxf(top, scores[i][h]);
      top = warp_maximum(top);
      shrink[h] = ptx::exp2(peak[h] - top);
      peak[h] = top;
      total[h] *= shrink[h];
    }
    const int col = threadIdx.x % 4;
    const float even = col == 0 ? shrink[0] : shrink[2], odd = col == 0 ? shrink[1] : shrink[3];
#pragma unroll
    for (int s = 0; s < TILES; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[s][i] *= i & 1 ? odd : even;
  }
};

// Value books: a row is an entry of 8 groups' books, so that 8 lanes that want different groups do not meet in a bank.
static constexpr int ROW_GROUPS = 8, GROUP_ROWS = GROUPS / ROW_GROUPS, BOOK_ROW_BYTES = ROW_GROUPS * ENTRY_BYTES;
static constexpr int ROWS_BYTES = ENTRIES * BOOK_ROW_BYTES;  // of 8 groups, one stage

// The copy of the head's value books into shared memory. All threads call everything.
struct BookCopy {
  u64* barrier;

  // `from`: the first stage's, `apart` bytes from there to the next's.
  KVRT_INLINE void ask(u8* to, const u8* from, i64 apart) const {
    constexpr int BYTES = VALUES_BYTES / V_STAGES;
#if KVRT_BULK_COPIES
    if (threadIdx.x == 0) {
      ptx::barrier_init(barrier);
      ptx::barriers_are_made();
      ptx::barrier_expect(barrier, VALUES_BYTES);
      for (int stage = 0; stage < V_STAGES; ++stage)
        for (int at = 0; at < BYTES; at += ROWS_BYTES)
          ptx::copy_bulk(to + stage * BYTES + at, from + stage * apart + at, ROWS_BYTES, barrier);
    }
#else
    for (int stage = 0; stage < V_STAGES; ++stage)
      for (int at = threadIdx.x * 16; at < BYTES; at += WARPS * WARP * 16)
        ptx::copy_async16(to + stage * BYTES + at, from + stage * apart + at);
    ptx::commit_copies();
#endif
  }
  // The thread's own part, before threads wait for each other; and all of it, after that.
  KVRT_INLINE void wait_for_own() const {
#if !KVRT_BULK_COPIES
    ptx::wait_copies<0>();
#endif
  }
  KVRT_INLINE void wait() const {
#if KVRT_BULK_COPIES
    ptx::barrier_wait(barrier, 0);
#endif
  }
};

// Weighted sums of 64 values. A lane makes those of token l / 4 of 8, of one group of 8 channels at a time: of group
// l % 4 of four, and of the other four, which the lanes of odd tokens take first. Transposed by pairs of channels, they
// are A: rows are (group, channel of the pair), see `channel_of_sum`, along the depth are tokens.
struct BookValues {
  ptx::Shared places[2];  // of the lane's group in the first row, step by step
  bool odd;

  KVRT_INLINE explicit BookValues(const u8* books) : odd(threadIdx.x / 4 % 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      places[i] = ptx::shared_address(books + (4 * ((i + odd) % 2) + threadIdx.x % 4) * ENTRY_BYTES);
  }

  KVRT_INLINE void add(HeadSoftmax& state, const PageCodes<V_BOOKS>& codes) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 weights[4];
      state.read(weights, half);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int rows = 0; rows < GROUP_ROWS; ++rows) {
          u32 a[4][4];  // of pairs of channels: registers of A
#pragma unroll
          for (int octet = 0; octet < 2; ++octet) {
            u32 first[4], second[4];
            const int at = ((4 * half + 2 * j + octet) * GROUP_ROWS + rows) * 2 * V_STAGES;
            sum(first, codes, at, rows, 0);
            sum(second, codes, at + V_STAGES, rows, 1);
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              a[c][2 * octet] = ptx::transpose8x8(odd ? second[c] : first[c]);
              a[c][2 * octet + 1] = ptx::transpose8x8(odd ? first[c] : second[c]);
            }
          }
#pragma unroll
          for (int c = 0; c < 4; ++c)
            ptx::mma_half(state.sums[4 * rows + c], a[c][0], a[c][1], a[c][2], a[c][3], weights[2 * j],
                          weights[2 * j + 1]);
        }
    }
  }

 private:
  // 8 channels: the sum of all stages' entries.
  KVRT_INLINE void sum(u32 (&to)[4], const PageCodes<V_BOOKS>& codes, int at, int rows, int step) const {
#pragma unroll
    for (int stage = 0; stage < V_STAGES; ++stage) {
      const u32 offset = codes.code(at + stage) * BOOK_ROW_BYTES;
      const uint4 x = ptx::load_shared16(places[step] + offset + (stage * GROUP_ROWS + rows) * ROWS_BYTES);
      const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int c = 0; c < 4; ++c) to[c] = stage == 0 ? words[c] : ptx::add_half2(to[c], words[c]);
    }
  }
};
