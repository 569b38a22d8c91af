// Vector-quantised keys and values: sums of codebook entries. Twin of kvrt/kvstore/codecs/vq.py, which has the
// layout of tables, and vq_codes.py, which has that of codes.
#pragma once
#include "codec.cuh"

static constexpr int MOST_STAGES = 64;
static constexpr float FARTHEST = 3.0e38f;  // no distance is beyond

// One side's codebooks, the head's own set or the one that all heads share: groups of `d` channels, `stages` books
// of entries each, stage by stage.
struct Books {
  int d, stages, bits, groups, dim, is_value;
  i64 stage_entries;  // of one stage, in all sets
  const u16* entries;
  const float *norms, *centre, *scale, *inverse;  // half the squared norms; of keys, (dim,) of the head
  const int* order;                               // of keys, the channels group by group: (dim,) of the head

  KVRT_INLINE Books(const Part& part, int dim)
      : d(part.own(0)),
        stages(part.own(1)),
        bits(part.own(2)),
        groups(part.own(3)),
        dim(dim),
        is_value(part.is_value) {
    const i64 set = i64(groups) << bits, own = part.own(4) ? part.head : 0, plane = i64(part.heads) * dim;
    stage_entries = (part.own(4) ? part.heads : 1) * set;
    const u16* all = reinterpret_cast<const u16*>(part.table());
    const float* all_norms = reinterpret_cast<const float*>(all + stages * stage_entries * d);
    entries = all + own * set * d;
    norms = all_norms + own * set;
    centre = all_norms + stages * stage_entries + i64(part.head) * dim;
    scale = centre + plane;
    inverse = scale + plane;
    order = reinterpret_cast<const int*>(inverse + plane);
  }

  KVRT_INLINE int book(int stage, int group) const { return stage * groups + group; }
  // Element c of a group.
  KVRT_INLINE int channel(int group, int c) const {
    if (d == dim) return c;
    return is_value ? 8 * group + c : __ldg(order + 8 * group + c);
  }
  // Entries of 8 channels of values lie 8 groups side by side: see attend_books.cuh.
  KVRT_INLINE int packed() const { return is_value && d != dim ? 8 : 1; }
  KVRT_INLINE const u16* entry(int stage, int group, int index) const {
    const int rows = packed();
    const i64 row = (i64(group / rows) << bits) + index;
    return entries + (stage * stage_entries + row * rows + group % rows) * d;
  }
  KVRT_INLINE const float* norms_of(int stage, int group) const {
    return norms + stage * stage_entries + (i64(group) << bits);
  }

  // What is quantised of a number, and the number again.
  KVRT_INLINE float inwards(float x, int c) const {
    return is_value ? x : __fmul_rn(__fadd_rn(x, -centre[c]), scale[c]);
  }
  KVRT_INLINE float outwards(float x, int c) const {
    return is_value ? x : __fadd_rn(centre[c], __fmul_rn(inverse[c], x));
  }
};

// Where the code of a token and a book is: groups of 8 channels lie in the order of fragments (attend_books.cuh).
KVRT_INLINE int place_of_code(const Books& books, int t, int book) {
  int lane, at;
  if (books.is_value) {
    const int stage = book / books.groups, group = book % books.groups, n = t % 8;
    lane = 4 * n + group % 4;
    at = ((t / 8 * (books.groups / 8) + group / 8) * 2 + (group / 4 + n) % 2) * books.stages + stage;
  } else {
    const int steps = books.groups * books.stages / 4, block = book / 16, n = t % 8;
    const int round = steps - 4 * block < 4 ? steps - 4 * block : 4;
    lane = 4 * n + book % 4;
    at = t / 8 * steps + 4 * block + (book % 16 / 4 - n % round + round) % round;
  }
  return at / 16 * 512 + lane * 16 + at % 16;
}

// The nearest entry so far, the first of equals. A NaN is never nearer.
struct Nearest {
  float distance = FARTHEST;
  int index = 0;

  KVRT_INLINE void take(float other, int at) {
    if (other < distance) {
      distance = other;
      index = at;
    }
  }
};

// Groups of 8 channels: a warp has a group, a lane two tokens. Codes take the place of numbers in the tile.
KVRT_INLINE void encode_groups(const Books& books, const Tile& tile) {
  const int lane = threadIdx.x % WARP;
  for (int group = threadIdx.x / WARP; group < books.groups; group += THREADS / WARP) {
    float rest[2][8];
    for (int c = 0; c < 8; ++c)
      for (int i = 0; i < 2; ++i) {
        const int channel = books.channel(group, c);
        rest[i][c] = books.inwards(tile.at(lane + 32 * i, channel), channel);
      }
    for (int stage = 0; stage < books.stages; ++stage) {
      const uint4* entries = reinterpret_cast<const uint4*>(books.entry(stage, group, 0));
      const float* norms = books.norms_of(stage, group);
      const int pitch = books.packed();
      Nearest nearest[2];
#pragma unroll 4
      for (int index = 0; index < 256; ++index) {
        const uint4 words = __ldg(entries + index * pitch);
        const float2 x[4] = {ptx::unpack_half(words.x), ptx::unpack_half(words.y), ptx::unpack_half(words.z),
                             ptx::unpack_half(words.w)};
        const float norm = __ldg(norms + index);
        for (int i = 0; i < 2; ++i) {
          float sum = 0.0f;
          for (int c = 0; c < 4; ++c) sum = fmaf(rest[i][2 * c + 1], x[c].y, fmaf(rest[i][2 * c], x[c].x, sum));
          nearest[i].take(__fadd_rn(norm, -sum), index);
        }
      }
      for (int i = 0; i < 2; ++i) {
        const u16* found = books.entry(stage, group, nearest[i].index);
        for (int c = 0; c < 8; ++c) rest[i][c] = __fadd_rn(rest[i][c], -half_value(found[c]));
        tile.set_code(lane + 32 * i, books.channel(group, stage), nearest[i].index);
      }
    }
  }
}

// Whole heads: 64 tokens times 64 entries at a time, a thread has 4 of each. `room` is a second tile, for entries.
KVRT_INLINE void encode_head(const Books& books, const Tile& tile, const Tile& room, u16 (*codes)[PAGE_TOKENS]) {
  const int col = threadIdx.x % 16, row = threadIdx.x / 16;
  each_number(books.dim, [&](int t, int c) { tile.at(t, c) = books.inwards(tile.at(t, c), c); });
  for (int stage = 0; stage < books.stages; ++stage) {
    const float* norms = books.norms_of(stage, 0);
    Nearest nearest[4];
    for (int first = 0; first < 1 << books.bits; first += 64) {
      __syncthreads();  // what was read of the room, and residuals
      each_number(books.dim, [&](int t, int c) { room.at(t, c) = half_value(books.entry(stage, 0, first + t)[c]); });
      __syncthreads();
      float sums[4][4] = {};
      for (int c = 0; c < books.dim; ++c) {
        float x[4], e[4];
        for (int i = 0; i < 4; ++i) {
          x[i] = tile.at(row + 16 * i, c);
          e[i] = room.at(col + 16 * i, c);
        }
        for (int i = 0; i < 4; ++i)
          for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(x[i], e[j], sums[i][j]);
      }
      for (int j = 0; j < 4; ++j) {
        const int index = first + col + 16 * j;
        const float norm = __ldg(norms + index);
        for (int i = 0; i < 4; ++i) nearest[i].take(__fadd_rn(norm, -sums[i][j]), index);
      }
    }
    for (int i = 0; i < 4; ++i) {
      Nearest& mine = nearest[i];
      for (int way = 1; way < 16; way *= 2) {
        const float distance = __shfl_xor_sync(ALL_LANES, mine.distance, way);
        const int index = __shfl_xor_sync(ALL_LANES, mine.index, way);
        if (distance < mine.distance || (distance == mine.distance && index < mine.index)) {
          mine.distance = distance;
          mine.index = index;
        }
      }
      if (col == 0) codes[stage][row + 16 * i] = u16(mine.index);
    }
    __syncthreads();
    each_number(books.dim, [&](int t, int c) {
      tile.at(t, c) = __fadd_rn(tile.at(t, c), -half_value(books.entry(stage, 0, codes[stage][t])[c]));
    });
  }
  __syncthreads();
}

// Where the low bytes, and the further ones, of the tokens 8 n ... 8 n + 7 of a book of whole heads are.
struct HeadPlaces {
  int low, further;

  KVRT_INLINE HeadPlaces(int books, int bits, int is_value, int book, int n) {
    const int more = bits - 8, behind = PAGE_TOKENS * books;
    if (is_value) {
      low = 16 * (books * (n / 2) + book) + n % 2 * 8;
      further = behind + more * (8 * book + n);
      return;
    }
    // Blocks of 16 books, at last of 8, of 4 and of what is left.
    int first = book / 16 * 16, rows = 4;
    for (int size = 16; size >= 4; size /= 2, rows /= 2) {
      if (books - first < size) continue;
      if (book - first < size) break;
      first += size;
    }
    const int width = books - first < 4 ? books - first : 4;
    if (rows == 0) rows = 1;
    const int row = (book - first) / width, col = (book - first) % width, step = (row - n) & (rows - 1);
    low = 64 * first + 8 * (width * (8 * step + n) + col);
    further = behind + more * (8 * first + rows * (width * n + col) + step);
  }
};

KVRT_INLINE void pack_head(const Books& books, u16 (*codes)[PAGE_TOKENS], u8* to) {
  const int more = books.bits - 8;
  for (int i = threadIdx.x; i < books.stages * 8; i += THREADS) {
    const int book = i / 8, n = i % 8;
    const HeadPlaces places(books.stages, books.bits, books.is_value, book, n);
    u32 word = 0;
    for (int t = 0; t < 8; ++t) {
      const u32 code = codes[book][8 * n + t];
      to[places.low + t] = u8(code);
      word |= code >> 8 << (more * t);
    }
    for (int k = 0; k < more; ++k) to[places.further + k] = u8(word >> 8 * k);
  }
}
KVRT_INLINE int code_of_head(const Books& books, const u8* from, int book, int t) {
  const int more = books.bits - 8;
  const HeadPlaces places(books.stages, books.bits, books.is_value, book, t / 8);
  u32 word = 0;
  for (int k = 0; k < more; ++k) word |= u32(from[places.further + k]) << 8 * k;
  return int(from[places.low + t % 8] | (word >> (more * (t % 8)) & ((1u << more) - 1)) << 8);
}

KVRT_INLINE void vq_encode(const Part& part, const Tile& tile, const Tile& room) {
  const Books books(part, tile.dim);
  if (books.d == books.dim) {
    __shared__ u16 codes[MOST_STAGES][PAGE_TOKENS];
    encode_head(books, tile, room, codes);
    pack_head(books, codes, part.codes());
    return;
  }
  encode_groups(books, tile);
  __syncthreads();
  const int count = books.groups * books.stages;
  for (int i = threadIdx.x; i < count * PAGE_TOKENS; i += THREADS) {
    const int t = i % PAGE_TOKENS, book = i / PAGE_TOKENS;
    const int channel = books.channel(book % books.groups, book / books.groups);  // of element number `stage`
    part.codes()[place_of_code(books, t, book)] = u8(tile.code(t, channel));
  }
}

KVRT_INLINE void vq_decode(const Part& part, const Tile& tile) {
  const Books books(part, tile.dim);
  const u8* codes = part.codes();
  // Number c of the groups one after the other.
  each_number(books.dim, [&](int t, int c) {
    const bool whole = books.d == books.dim;
    const int group = whole ? 0 : c / 8, element = whole ? c : c % 8, channel = books.channel(group, element);
    float sum = 0.0f;
    for (int stage = 0; stage < books.stages; ++stage) {
      const int book = books.book(stage, group);
      const int code = whole ? code_of_head(books, codes, book, t) : codes[place_of_code(books, t, book)];
      sum = __fadd_rn(sum, half_value(books.entry(stage, group, code)[element]));
    }
    tile.at(t, channel) = books.outwards(sum, channel);
  });
}
