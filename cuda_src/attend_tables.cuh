// What a CTA of decode attention has in shared memory besides queries and pages: angles, a bias, tables of a codec.
//
// EXTRA_BYTES (-D) is their size; `extra_bytes` of kvrt/backends/attend_variant.py counts as this does.
#pragma once
#include "attend_query.cuh"
#include "fields.cuh"

static constexpr bool HAS_TURNS = FORM == VIEW_PRE || K_BIAS;
// Tiles that the table of angles has: all where a bias is added, else those that are turned.
static constexpr int TURN_TILES = K_BIAS ? TILES : TURNED_TILES;
static constexpr int TURNS_BYTES = HAS_TURNS ? 4 * TURN_TILES * WARP * 16 : 0;
static constexpr int REST_BYTES = K_BIAS ? TURNS_BYTES : 0;
static constexpr int LEFT_OUT_BYTES = K_BIAS ? HEAD_DIM * 4 : 0;
static constexpr int BIAS_BYTES = K_BIAS ? 8 * HEAD_DIM * 4 : 0;
// Tiles from TURNED_TILES on are slow: their channels turn so little within a page that cosines and sines are straight
// lines there.
static constexpr bool HAS_SLOW = TURNED_TILES < TILES;
KVRT_INLINE bool is_turned(int s) { return FORM == VIEW_PRE && s < TURNED_TILES; }
static constexpr int SLOW_BYTES = HAS_SLOW ? TILES * 4 * 16 : 0;
static constexpr int LEVELS_BYTES = 32;
static constexpr int LOOKUP_ROW = 256;

#if K_CODEC == 4
static constexpr int K_COLUMNS_BYTES = TILES * 4 * 16;
static constexpr bool KEY_OUTLIERS = K_SLOTS > 0;
#else
static constexpr int K_COLUMNS_BYTES = 0;
static constexpr bool KEY_OUTLIERS = false;
#endif
#if V_CODEC == 4
static constexpr bool VALUE_OUTLIERS = V_SLOTS > 0;
static constexpr int V_SHARED_BYTES = 64 * 4 + 2 * 64 * V_SLOTS * 4;  // behind a page's run, in a stage
#else
static constexpr bool VALUE_OUTLIERS = false;
static constexpr int V_SHARED_BYTES = 0;
#endif

// Whether keys must become numbers, or levels are enough, where half goes into the query and centre into a sum.
static constexpr bool KEYS_ARE_NUMBERS = FORM == VIEW_PRE || KEY_OUTLIERS;

// Where outliers are put into tiles, of 16 tokens and 16 channels each: four of keys, eight of values at a time (and of
// keys where values need that room, too). Values go where a page's keys were, if there is room.
static constexpr int KEY_ROOM = 2048, VALUE_ROOM = 4096;
static constexpr bool VALUES_IN_PLACE_OF_KEYS = VALUE_OUTLIERS && V_CODES_OFFSET >= VALUE_ROOM;

// Rows of the table that levels are looked up in.
KVRT_INLINE constexpr int lookup_rows(int bits) { return bits == 3 ? 64 : 256; }
#if LOOKUP && K_CODEC == 4
static constexpr int K_LOOKUP_ROWS = lookup_rows(K_BITS);
#else
static constexpr int K_LOOKUP_ROWS = 0;
#endif
#if LOOKUP && V_CODEC == 4
static constexpr int V_LOOKUP_ROWS = lookup_rows(V_BITS);
#else
static constexpr int V_LOOKUP_ROWS = 0;
#endif
static constexpr int LOOKUP_ROWS = K_LOOKUP_ROWS > V_LOOKUP_ROWS ? K_LOOKUP_ROWS : V_LOOKUP_ROWS;

// Offsets.
static constexpr int REST_AT = TURNS_BYTES, LEFT_OUT_AT = REST_AT + REST_BYTES, BIAS_AT = LEFT_OUT_AT + LEFT_OUT_BYTES;
static constexpr int SLOW_AT = BIAS_AT + BIAS_BYTES, K_LEVELS_AT = SLOW_AT + SLOW_BYTES;
static constexpr int K_COLUMNS_AT = K_LEVELS_AT + (K_CODEC == 4 ? LEVELS_BYTES : 0);
static constexpr int V_LEVELS_AT = K_COLUMNS_AT + K_COLUMNS_BYTES;
static constexpr int LOOKUP_AT = V_LEVELS_AT + (V_CODEC == 4 ? LEVELS_BYTES : 0);
static constexpr int WARPS_AT = LOOKUP_AT + LOOKUP_ROWS * LOOKUP_ROW;
static constexpr int WARP_BYTES = VALUE_OUTLIERS && !VALUES_IN_PLACE_OF_KEYS ? VALUE_ROOM : KEY_OUTLIERS ? KEY_ROOM : 0;
static_assert(WARPS_AT + WARPS * WARP_BYTES == EXTRA_BYTES, "attend_variant.py counts otherwise");

struct Tables {
  u8* place;
  // 1024 as two halves. To the compiler it is no constant, so it stays in a register instead of being moved there anew.
  u32 thousand;

  // cos and sin of the offsets in a block, as A fragments: the halves of [j][s][lane] are cos of rows lane / 4 and + 8
  // for the channels that the lane holds of tile s, then sin.
  KVRT_INLINE uint4 turn(int j, int s) const { return reinterpret_cast<const uint4*>(place)[at(j, s)]; }
  // What these halves leave over.
  KVRT_INLINE uint4 turn_rest(int j, int s) const { return reinterpret_cast<const uint4*>(place + REST_AT)[at(j, s)]; }
  // Of a slow tile: cos and sin at a block's middle, the angle that half a block adds, and minus that.
  KVRT_INLINE uint4 slow(int s) const {
    return reinterpret_cast<const uint4*>(place + SLOW_AT)[4 * s + threadIdx.x % 4];
  }
  // (HEAD_DIM,) f32: the bias that is left out of the head's keys.
  KVRT_INLINE float* left_out() const { return reinterpret_cast<float*>(place + LEFT_OUT_AT); }
  // (8, 2, HALF) f32: what the bias adds to a score, by query head and RoPE pair, at an angle of 0 and of 90 degrees.
  KVRT_INLINE float* bias() const { return reinterpret_cast<float*>(place + BIAS_AT); }
  // Half and centre of each channel of keys: uint4 [s][lane % 4] of half (low, high channels), centre (low, high).
  KVRT_INLINE u32* columns() const { return reinterpret_cast<u32*>(place + K_COLUMNS_AT); }
  KVRT_INLINE uint4 column(int s) const { return reinterpret_cast<const uint4*>(columns())[4 * s + threadIdx.x % 4]; }
  // Levels: 16 low bytes, 16 high bytes.
  KVRT_INLINE u8* levels(bool is_value) const { return place + (is_value ? V_LEVELS_AT : K_LEVELS_AT); }
  // (LOOKUP_ROWS, LOOKUP_ROW) bytes: levels of two or four codes, see attend_fitted.cuh.
  KVRT_INLINE u8* lookup() const { return place + LOOKUP_AT; }
  // WARP_BYTES of the warp's own.
  KVRT_INLINE u8* room() const { return place + WARPS_AT + threadIdx.x / WARP * WARP_BYTES; }

 private:
  KVRT_INLINE int at(int j, int s) const { return (j * TURN_TILES + s) * WARP + int(threadIdx.x % WARP); }
};

// What a layer's settings say about tables: addresses in global memory. All are read at once and before anything is
// waited for, because memory that nobody has read yet takes half a microsecond.
struct Sources {
  const float *turns = nullptr, *bias = nullptr;
  const float *keys = nullptr, *values = nullptr;              // what was fitted
  const float *key_scales = nullptr, *value_scales = nullptr;  // fp8: of each head
  i64 heads = 0;

  KVRT_INLINE explicit Sources(const i64* layer) {
    if (HAS_TURNS) turns = address(layer + VIEW_TURNS);
    if (K_BIAS) bias = address(layer + VIEW_KEY_BIAS);
    if (K_CODEC == 4) keys = address(layer + VIEW_KEY_SIDE + VIEW_TABLE);
    if (K_CODEC == 4) heads = ptx::load_early(layer + VIEW_HEADS);
    if (V_CODEC == 4) values = address(layer + VIEW_VALUE_SIDE + VIEW_TABLE);
    if (K_CODEC == 3) key_scales = address(layer + VIEW_KEY_SIDE + VIEW_STATE);
    if (V_CODEC == 3) value_scales = address(layer + VIEW_VALUE_SIDE + VIEW_STATE);
  }

 private:
  static KVRT_INLINE const float* address(const i64* place) {
    return reinterpret_cast<const float*>(ptx::load_early(place));
  }
};

// What tiles are turned with: a thread makes every WARPS * WARP-th entry of the table. The first are asked for before
// anything is waited for.
struct QuickTurns {
  static constexpr int ROW = TURN_TILES > 0 ? TURN_TILES : 1;
  static constexpr int COUNT = HAS_TURNS ? 4 * TURN_TILES * WARP : 0;
  static constexpr int EACH = (COUNT + WARPS * WARP - 1) / (WARPS * WARP);
  static constexpr int AT_ONCE = EACH < 4 ? EACH : 4;  // more would take registers
  float2 parts[AT_ONCE > 0 ? AT_ONCE : 1][4];

  KVRT_INLINE explicit QuickTurns(const float* turns) { load(turns, 0); }

  KVRT_INLINE void write(const Tables& tables, const float* turns) {
#pragma unroll
    for (int first = 0; first < EACH; first += AT_ONCE) {
      if (first > 0) load(turns, first);
      store(tables, first);
    }
  }

 private:
  static KVRT_INLINE int place(int n) { return threadIdx.x + n * WARPS * WARP; }

  KVRT_INLINE void load(const float* turns, int first) {
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const int i = place(first + n), tile = i / WARP, lane = i % WARP;
      if (i >= COUNT) break;
      const int token = 16 * (tile / ROW) + lane / 4, c = 8 * (tile % ROW) + 2 * (lane % 4);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float* from = turns + (token + 8 * (r & 1)) * HEAD_DIM + (r >> 1) * HALF + c;
        parts[n][r] = __ldg(reinterpret_cast<const float2*>(from));
      }
    }
  }

  KVRT_INLINE void store(const Tables& tables, int first) const {
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const int i = place(first + n);
      if (i >= COUNT) break;
      u32 kept[4], rests[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float2& x = parts[n][r];
        kept[r] = ptx::pack_half(x.x, x.y);
        const float2 rounded = ptx::unpack_half(kept[r]);
        rests[r] = ptx::pack_half(x.x - rounded.x, x.y - rounded.y);
      }
      reinterpret_cast<uint4*>(tables.place)[i] = {kept[0], kept[1], kept[2], kept[3]};
      if (K_BIAS) reinterpret_cast<uint4*>(tables.place + REST_AT)[i] = {rests[0], rests[1], rests[2], rests[3]};
    }
  }
};

// What slow tiles are turned with; a thread makes that of a few channels.
struct SlowTurns {
  static constexpr int FIRST = 8 * TURNED_TILES, EACH = (HALF - FIRST + WARPS * WARP - 1) / (WARPS * WARP);
  static constexpr int ROOM = EACH > 0 ? EACH : 1;
  // Lines are right 24 tokens from the middle: elsewhere they are too low by as much as there too high.
  static constexpr int MIDDLE = 32, NODE = 24;
  float2 middle[ROOM], node[ROOM];  // cosines and sines

  KVRT_INLINE explicit SlowTurns(const float* turns) {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = channel(n);
      if (i >= HALF) break;
      const float *first = turns + MIDDLE * HEAD_DIM + i, *second = first + NODE * HEAD_DIM;
      middle[n] = {__ldg(first), __ldg(first + HALF)};
      node[n] = {__ldg(second), __ldg(second + HALF)};
    }
  }

  KVRT_INLINE void write(const Tables& tables) const {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = channel(n);
      if (i >= HALF) break;
      const float2 x = middle[n], y = node[n];
      // Reciprocals out of roots: divisions are long.
      const float root = rsqrtf(x.x * x.x + x.y * x.y), norm = root * root;  // with the amplitude of RoPE
      const float cosine = (y.x * x.x + y.y * x.y) * norm, sine = (y.y * x.x - y.x * x.y) * norm;
      u16* to = reinterpret_cast<u16*>(tables.place + SLOW_AT) + i / 2 * 8 + i % 2;
      to[0] = ptx::float_to_half(x.x * cosine);
      to[2] = ptx::float_to_half(x.y * cosine);
      to[4] = ptx::float_to_half(sine * rsqrtf(cosine * cosine) * (32.0f / NODE));  // the angle is small
      to[6] = to[4] ^ 0x8000u;
    }
  }

 private:
  static KVRT_INLINE int channel(int n) { return FIRST + n * WARPS * WARP + threadIdx.x; }
};

// The bias that is left out of a head's keys.
KVRT_INLINE void fill_left_out(const Tables& tables, const Sources& sources, int head) {
  if (K_BIAS)
    for (int i = threadIdx.x; i < HEAD_DIM; i += WARPS * WARP)
      tables.left_out()[i] = sources.bias[head * HEAD_DIM + i];
}

// What it adds to scores, from queries (8, QUERY_PITCH) f32 in shared memory; threads wait for each other before and
// after.
KVRT_INLINE void fill_bias(const Tables& tables, const float* queries) {
  if (!K_BIAS) return;
  const float* left_out = tables.left_out();
  __syncthreads();
  for (int i = threadIdx.x; i < 8 * HALF; i += WARPS * WARP) {
    const int head = i / HALF, c = i % HALF, at = head * HEAD_DIM + c;
    const float low = queries[head * QUERY_PITCH + c], high = queries[head * QUERY_PITCH + HALF + c];
    tables.bias()[at] = low * left_out[c] + high * left_out[HALF + c];
    tables.bias()[at + HALF] = high * left_out[c] - low * left_out[HALF + c];
  }
}

// Rotate the keys of a tile by their offsets: the partners of a pair are in registers 0 and 2, 1 and 3.
KVRT_INLINE void turn_tile(u32 (&a)[4], const uint4& turn) {
  const u32 low = ptx::fma_half2(a[0], turn.x, ptx::neg_half2(ptx::mul_half2(a[2], turn.z)));
  const u32 next = ptx::fma_half2(a[1], turn.y, ptx::neg_half2(ptx::mul_half2(a[3], turn.w)));
  a[2] = ptx::fma_half2(a[0], turn.z, ptx::mul_half2(a[2], turn.x));
  a[3] = ptx::fma_half2(a[1], turn.w, ptx::mul_half2(a[3], turn.y));
  a[0] = low;
  a[1] = next;
}

// The same of bf16 keys, whose rotation needs more bits: what bf16 leaves over goes to `rest`.
KVRT_INLINE void turn_bfloats(u32 (&a)[4], u32 (&rest)[4], const uint4& turn) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float2 low = ptx::unpack_bfloat(a[r]), high = ptx::unpack_bfloat(a[2 + r]);
    const float2 c = ptx::unpack_half(r ? turn.y : turn.x), s = ptx::unpack_half(r ? turn.w : turn.z);
    const float2 x = {low.x * c.x - high.x * s.x, low.y * c.y - high.y * s.y};
    const float2 y = {high.x * c.x + low.x * s.x, high.y * c.y + low.y * s.y};
    a[r] = ptx::pack_bfloat(x.x, x.y);
    a[2 + r] = ptx::pack_bfloat(y.x, y.y);
    const float2 p = ptx::unpack_bfloat(a[r]), q = ptx::unpack_bfloat(a[2 + r]);
    rest[r] = ptx::pack_bfloat(x.x - p.x, x.y - p.y);
    rest[2 + r] = ptx::pack_bfloat(y.x - q.x, y.y - q.y);
  }
}

// Add to COUNT tiles of scores, from tile `first` of the block on, what the bias that is left out of keys adds to them.
// `base` (2, HALF) f32 are the angles of the block.
template <int COUNT>
KVRT_INLINE void add_bias(float (&scores)[COUNT][4], const Tables& tables, const float* base, int first,
                          const float (&unscale)[2]) {
  const int head = threadIdx.x % WARP / 4, col = threadIdx.x % 4;
  float sums[COUNT][4];
#pragma unroll
  for (int j = 0; j < COUNT; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[j][i] = 0;
#pragma unroll 2  // more would take registers
  for (int s = 0; s < TILES; ++s) {
    const int c = 8 * s + 2 * col;
    const float* mine = tables.bias() + head * HEAD_DIM + c;
    const float2 p = load_pair(mine), q = load_pair(mine + HALF);
    const float2 cosine = load_pair(base + c), sine = load_pair(base + HALF + c);
    const float2 x = {cosine.x * p.x + sine.x * q.x, cosine.y * p.y + sine.y * q.y};
    const float2 y = {cosine.x * q.x - sine.x * p.x, cosine.y * q.y - sine.y * p.y};
    // A bias may make scores of hundreds, so everything is in two halves.
    const u32 low = ptx::pack_half(x.x, x.y), high = ptx::pack_half(y.x, y.y);
    const float2 a = ptx::unpack_half(low), b = ptx::unpack_half(high);
    const u32 low_rest = ptx::pack_half(x.x - a.x, x.y - a.y), high_rest = ptx::pack_half(y.x - b.x, y.y - b.y);
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      const uint4 turn = tables.turn(first + j, s), rest = tables.turn_rest(first + j, s);
      ptx::mma_half(sums[j], turn.x, turn.y, turn.z, turn.w, low, high);
      ptx::mma_half(sums[j], turn.x, turn.y, turn.z, turn.w, low_rest, high_rest);
      ptx::mma_half(sums[j], rest.x, rest.y, rest.z, rest.w, low, high);
    }
  }
  // Scores are times the power of two that is in the query.
  const float up[2] = {__uint_as_float(0x7F000000u - __float_as_uint(unscale[0])),
                       __uint_as_float(0x7F000000u - __float_as_uint(unscale[1]))};
#pragma unroll
  for (int j = 0; j < COUNT; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[j][i] += sums[j][i] * up[i & 1];
}
