// Kernels that move tokens into and out of a store. Twins of kvrt/backends/cpu_store.py and of the codecs: what they
// write is equal byte for byte (compiled with -fmad=false; what is rounded once says fmaf).
//
// `layer` is a layer's settings (kvrt/backends/view.py), `pages` the page table. All formats are chosen at run time.
#include "codecs.cuh"
#include "row.cuh"

// Keys or values (n, heads, dim) f32 in place, from the model's basis into the store's.
//
// Inwards: hold to +-1e30, rotate backwards by `turns`, leave out `bias` (heads, dim) rotated by `bias_turns`, Hadamard
// transform in blocks. Outwards: all of it undone. turns, bias_turns (n, 2, dim / 2) f32 hold cos and sin for each
// token; each of the steps is left out where its address or block is 0.
// Grid (n, heads / warps, up), one warp a row, dim floats of shared memory a warp; dim is MOST_CHANNELS at most.
extern "C" __global__ void change_basis(float* rows, int heads, int dim, int inwards, const float* turns,
                                        const float* bias, const float* bias_turns, int block) {
  KVRT_DYNAMIC_SHARED(memory);
  const int warp = threadIdx.x / WARP, head = blockIdx.y * (blockDim.x / WARP) + warp;
  if (head >= heads) return;
  const i64 token = blockIdx.x;
  float* at = rows + (token * heads + head) * dim;
  const float* own = bias + i64(head) * dim;
  Row row(dim, reinterpret_cast<float*>(memory) + warp * dim);
  row.each([&](float& x, int c) { x = at[c]; });
  Angles turn, bias_turn;
  if (turns) turn = Angles(turns + token * dim, dim);
  if (bias_turns) bias_turn = Angles(bias_turns + token * dim, dim);
  if (inwards) {
    row.hold();
    if (turns) row.turn(turn, -1.0f);
    if (bias) row.add(own, bias_turn, !bias_turns, -1.0f);
    if (block) row.hadamard(block);
  } else {
    if (block) row.hadamard(block);
    if (bias) row.add(own, bias_turn, !bias_turns, 1.0f);
    if (turns) row.turn(turn, 1.0f);
  }
  row.each([&](float x, int c) { at[c] = x; });
}

// Where a slot of the tail, or of the sinks, has its row of one head; `kind` is set to that of its floats.
KVRT_INLINE u8* exact_row(const i64* layer, int is_value, int sink, i64 slot, int head, int* kind) {
  const i64 rows = layer[sink ? VIEW_SINK_ROWS : VIEW_TAIL_ROWS];
  const int keys = sink ? VIEW_SINK_KEYS : VIEW_TAIL_KEYS, values = sink ? VIEW_SINK_VALUES : VIEW_TAIL_VALUES;
  *kind = int(layer[is_value ? VIEW_VALUE_KIND : VIEW_KEY_KIND]);
  return reinterpret_cast<u8*>(layer[is_value ? values : keys]) +
         (head * rows + slot % rows) * layer[VIEW_DIM] * kind_bytes(*kind);
}

// Store keys, values (n, heads, dim) f32 at slots slot, ... of the tail, or of the sinks. Grid (n, heads).
extern "C" __global__ void append(const i64* layer, const float* keys, const float* values, int slot, int sink) {
  const int heads = int(layer[VIEW_HEADS]), dim = int(layer[VIEW_DIM]), head = blockIdx.y;
  const i64 row = (i64(blockIdx.x) * heads + head) * dim;
  int key_kind, value_kind;
  u8* key_row = exact_row(layer, 0, sink, i64(slot) + blockIdx.x, head, &key_kind);
  u8* value_row = exact_row(layer, 1, sink, i64(slot) + blockIdx.x, head, &value_kind);
  for (int i = threadIdx.x; i < dim; i += blockDim.x) {
    store_number(key_row, key_kind, i, keys[row + i]);
    store_number(value_row, value_kind, i, values[row + i]);
  }
}

// Take up the token of a decode step. qkv (heads + 2 * KV heads, dim) f32: q, in place, and k are normed, each head by
// itself, where gains (dim) are given, and rotated to the token's position; k and v go in the store's basis to where
// `lengths`, a published extent, says. q goes to the queries that are kept, too, if any are. Grid (heads + 2 * KV heads,), one warp, dim floats of shared memory.
extern "C" __global__ void __launch_bounds__(32)
enter(const i64* layer, const i64* lengths, float* qkv, int heads, const float* q_gains, float q_eps,
      const float* k_gains, float k_eps) {
  KVRT_DYNAMIC_SHARED(memory);
  ptx::let_next_start();
  const int kv_heads = int(layer[VIEW_HEADS]), dim = int(layer[VIEW_DIM]), form = int(layer[VIEW_FORM]);
  const int index = blockIdx.x, is_query = index < heads, is_value = index >= heads + kv_heads;
  const int head = is_query ? index : (index - heads) % kv_heads;
  const int block = int(layer[is_value ? VIEW_VALUE_HADAMARD : VIEW_KEY_HADAMARD]);
  const float* bias = is_value ? nullptr : reinterpret_cast<const float*>(layer[VIEW_KEY_BIAS]);
  const float* gains = is_query ? q_gains : is_value ? nullptr : k_gains;
  const float* table = reinterpret_cast<const float*>(lengths + VIEW_LENGTHS);
  // All of this is older than the kernel before.
  Angles forwards, turn, bias_turn;
  if (!is_value) forwards = Angles(table + VIEW_FORWARDS * dim, dim);
  if (!is_query && !is_value && form != VIEW_POST)
    turn = Angles(table + (form == VIEW_PAGE ? VIEW_BASE : VIEW_BACKWARDS) * dim, dim);
  if (!is_query && bias) bias_turn = Angles(table + (form == VIEW_PAGE ? VIEW_OFFSET : VIEW_FORWARDS) * dim, dim);
  int kind;
  u8* place = exact_row(layer, is_value, int(lengths[VIEW_TOKEN_IS_SINK]), lengths[VIEW_TOKEN_SLOT], head, &kind);
  float* at = qkv + i64(index) * dim;
  Row row(dim, reinterpret_cast<float*>(memory));
  ptx::wait_for_previous();
  row.each([&](float& x, int c) { x = at[c]; });
  if (gains) {
    float squares = 0;
    row.each([&](float x, int) { squares += x * x; });
    for (int d = 1; d < WARP; d *= 2) squares += __shfl_xor_sync(ALL_LANES, squares, d);
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(squares / dim + (is_query ? q_eps : k_eps)));
    row.each([&](float& x, int c) { x = x * scale * gains[c]; });
  }
  if (!is_value) row.turn(forwards, 1.0f);
  if (is_query) {
    row.each([&](float x, int c) { at[c] = x; });
    if (float* kept = reinterpret_cast<float*>(layer[VIEW_QUERIES])) {
      float* mine = kept + (lengths[VIEW_TOKEN_SLOT] % VIEW_QUERY_ROWS * heads + index) * dim;
      row.each([&](float x, int c) { mine[c] = x; });
    }
    return;
  }
  if (block || bias || (!is_value && form != VIEW_POST)) {  // as change_basis does it
    row.hold();
    if (!is_value && form != VIEW_POST) row.turn(turn, -1.0f);
    if (bias) row.add(bias + i64(head) * dim, bias_turn, form == VIEW_PRE, -1.0f);
    if (block) row.hadamard(block);
  }
  row.each([&](float x, int c) { store_number(place, kind, c, x); });
}

// target (n, heads, dim) f32 = slots slot, slot + 1, ... of the tail, or of the sinks. Grid (n, heads).
extern "C" __global__ void recall(const i64* layer, int is_value, int slot, int sink, float* target) {
  const int heads = int(layer[VIEW_HEADS]), dim = int(layer[VIEW_DIM]), head = blockIdx.y;
  int kind;
  const u8* row = exact_row(layer, is_value, sink, i64(slot) + blockIdx.x, head, &kind);
  float* out = target + (i64(blockIdx.x) * heads + head) * dim;
  for (int i = threadIdx.x; i < dim; i += blockDim.x) out[i] = load_number(row, kind, i);
}

// rows (n, width) f32 in place = what they are once stored as floats of a kind. Grid (n).
extern "C" __global__ void round_rows(float* rows, int width, int kind) {
  float* row = rows + i64(blockIdx.x) * width;
  for (int i = threadIdx.x; i < width; i += blockDim.x) row[i] = rounded(row[i], kind);
}

KVRT_INLINE Part part_of(const i64* layer, int is_value, const i64* pages, int page, int head) {
  const i64* side = layer + (is_value ? VIEW_VALUE_SIDE : VIEW_KEY_SIDE);
  u8* base = reinterpret_cast<u8*>(pages[page] + layer[VIEW_LAYER_OFFSET]);
  u8* shared = base + layer[VIEW_SHARED_OFFSET] + side[VIEW_SHARED];
  return {side, is_value, head, int(layer[VIEW_HEADS]), base + head * layer[VIEW_RUN_BYTES], shared};
}

// Let the codec of one side look at all heads of page first_page + blockIdx.x, before `seal`; it writes measured state
// (where `first`) and what heads share. Tokens are where `seal` takes them from.
// Grid (pages, any number of blocks that share a page's heads or tokens, layers), THREADS; layers follow one another.
extern "C" __global__ void __launch_bounds__(256, 4)
survey(const i64* layer, int is_value, const i64* pages, int first_page, int first, int tail_first, int tail_slot,
       const float* fresh, int new_start, int new_tokens) {
  layer += i64(blockIdx.z) * VIEW_LAYER_SETTINGS;
  const int page = first_page + blockIdx.x;
  const Source source(layer, is_value, page, tail_first, tail_slot, fresh, new_start);
  survey_page(part_of(layer, is_value, pages, page, 0), source, first);
}

// Encode one side of page first_page + item / heads, head item % heads; item is blockIdx.x.
//
// Tokens from position new_start on are in fresh (new_tokens, heads, dim) f32, older ones in the ring, where position
// tail_first has slot tail_slot. Grid (pages * heads, layers), THREADS; layers follow one another. Shared memory: 64 *
// (dim + 1) floats, twice as many where whole heads are quantised.
extern "C" __global__ void __launch_bounds__(256, 4)
seal(const i64* layer, int is_value, const i64* pages, int first_page, int tail_first, int tail_slot,
     const float* fresh, int new_start, int new_tokens) {
  KVRT_DYNAMIC_SHARED(memory);
  layer += i64(blockIdx.y) * VIEW_LAYER_SETTINGS;
  const int heads = int(layer[VIEW_HEADS]), page = first_page + int(blockIdx.x) / heads;
  const Source source(layer, is_value, page, tail_first, tail_slot, fresh, new_start);
  const Part part = part_of(layer, is_value, pages, page, int(blockIdx.x) % heads);
  float* numbers = reinterpret_cast<float*>(memory);
  encode(part, source, Tile{numbers, source.dim}, Tile{numbers + PAGE_TOKENS * (source.dim + 1), source.dim});
}

// Decode one side of whole pages into out (pages * 64, heads, dim) f32, in the store's basis; keys of `norm` are
// multiplied by their factors. Grid (pages * heads), THREADS; shared memory as for `seal`.
extern "C" __global__ void __launch_bounds__(256, 4)
gather(const i64* layer, int is_value, const i64* pages, int first_page, float* out) {
  KVRT_DYNAMIC_SHARED(memory);
  const int heads = int(layer[VIEW_HEADS]), dim = int(layer[VIEW_DIM]);
  const int page = int(blockIdx.x) / heads, head = int(blockIdx.x) % heads;
  const Part part = part_of(layer, is_value, pages, first_page + page, head);
  const Tile tile{reinterpret_cast<float*>(memory), dim};
  const bool dense = part.side[VIEW_CODEC] == DENSE;
  if (!dense) decode(part, tile);
  const float* factors = is_value ? nullptr : reinterpret_cast<const float*>(layer[VIEW_KEY_NORM]);
  each_number(dim, [&](int t, int c) {
    const float x = dense ? dense_number(part, dim, t, c) : tile.at(t, c);
    out[((i64(page) * PAGE_TOKENS + t) * heads + head) * dim + c] = factors ? x * factors[i64(head) * dim + c] : x;
  });
}
