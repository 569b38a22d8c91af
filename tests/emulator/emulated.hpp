// Runs CUDA kernels on the CPU: one fiber a thread, collectives through slots of the warp.
//
// For tests of a kernel's logic where there is no GPU. Copies of cp.async happen as late as they may,
// when they are waited for, so that a missing wait shows. Blocks run one after the other.
#pragma once
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <type_traits>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __constant__ static const
#define __shared__ static
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define KVRT_DYNAMIC_SHARED(name) unsigned char* const name = emulated::block().shared.data()

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };

namespace emulated {

struct Fiber;

struct Barrier {
  int arrived = 0;
  long turns = 0;
};

struct Warp {
  Barrier barrier;
  int size = 0;
  unsigned slots[2][32][8];
};

struct Copy {
  void* target;
  const void* source;
  int bytes, wanted;
};

struct Fiber {
  ucontext_t start;
  jmp_buf place;
  std::vector<char> stack;
  bool started = false, done = false;
  dim3 thread;
  int lane = 0, flip = 0;
  Warp* warp = nullptr;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

struct Block {
  dim3 index, size, grid;
  std::vector<unsigned char> shared;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  Barrier named[16];
  Fiber* running = nullptr;
  jmp_buf scheduler;
  std::function<void()> body;
};

inline Block& block() {
  static Block instance;
  return instance;
}
inline Fiber& self() { return *block().running; }

inline void yield() {
  if (!_setjmp(self().place)) _longjmp(block().scheduler, 1);
}

inline void wait(Barrier& barrier, int size) {
  const long turn = barrier.turns;
  if (++barrier.arrived == size) {
    barrier.arrived = 0;
    ++barrier.turns;
    return;
  }
  while (barrier.turns == turn) yield();
}

inline void begin() {
  block().body();
  self().done = true;
  _longjmp(block().scheduler, 1);
}

// All lanes put `count` words down and see those of the others.
inline const unsigned (*exchange(const unsigned* words, int count))[8] {
  Fiber& fiber = self();
  auto* slots = fiber.warp->slots[fiber.flip];
  fiber.flip ^= 1;
  for (int i = 0; i < count; ++i) slots[fiber.lane][i] = words[i];
  wait(fiber.warp->barrier, fiber.warp->size);
  return slots;
}

inline void run_block() {
  Block& b = block();
  const int count = b.size.x * b.size.y * b.size.z;
  b.fibers.resize(count);
  b.warps.assign((count + 31) / 32, Warp());
  b.barrier = Barrier();
  for (Barrier& barrier : b.named) barrier = Barrier();
  for (int i = 0; i < count; ++i) {
    Fiber& fiber = b.fibers[i];
    fiber.stack.resize(1 << 17);
    fiber.started = fiber.done = false;
    fiber.flip = 0;
    fiber.open.clear();
    fiber.groups.clear();
    fiber.thread = {i % b.size.x, i / b.size.x % b.size.y, i / b.size.x / b.size.y};
    fiber.lane = i % 32;
    fiber.warp = &b.warps[i / 32];
    ++fiber.warp->size;
  }
  int left = count;
  long idle = 0;
  while (left) {
    const long before = left;
    for (volatile int i = 0; i < count; ++i) {
      Fiber& fiber = b.fibers[i];
      if (fiber.done) continue;
      b.running = &fiber;
      if (!_setjmp(b.scheduler)) {
        if (fiber.started) _longjmp(fiber.place, 1);
        fiber.started = true;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.data();
        fiber.start.uc_stack.ss_size = fiber.stack.size();
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, begin, 0);
        setcontext(&fiber.start);
      }
      if (b.fibers[i].done) --left;
    }
    idle = before == left ? idle + 1 : 0;
    if (idle > 10000000) {
      std::fprintf(stderr, "emulator: threads wait for each other for ever\n");
      std::abort();
    }
  }
}

struct Launch {
  unsigned grid[3], block[3], shared;
};

template <class... A>
void launch(void (*kernel)(A...), const Launch& where, void** arguments) {
  Block& b = block();
  b.grid = {where.grid[0], where.grid[1], where.grid[2]};
  b.size = {where.block[0], where.block[1], where.block[2]};
  b.body = [=] {
    [&]<size_t... I>(std::index_sequence<I...>) {
      kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
    }(std::index_sequence_for<A...>());
  };
  for (unsigned z = 0; z < b.grid.z; ++z)
    for (unsigned y = 0; y < b.grid.y; ++y)
      for (unsigned x = 0; x < b.grid.x; ++x) {
        b.index = {x, y, z};
        b.shared.assign(where.shared + 128, 0xFF);  // NaN: what is read must have been written
        run_block();
      }
}

}  // namespace emulated

#define threadIdx (emulated::self().thread)
#define blockIdx (emulated::block().index)
#define blockDim (emulated::block().size)
#define gridDim (emulated::block().grid)

inline void __syncthreads() {
  auto& b = emulated::block();
  emulated::wait(b.barrier, int(b.fibers.size()));
}
inline void __syncwarp(unsigned = 0) { emulated::exchange(nullptr, 0); }
inline void __threadfence() {}

template <class T>
T emulated_shuffle(T value, int source) {
  static_assert(sizeof(T) == 4);
  unsigned word;
  std::memcpy(&word, &value, 4);
  auto* slots = emulated::exchange(&word, 1);
  T result;
  std::memcpy(&result, &slots[source][0], 4);
  return result;
}
template <class T>
T __shfl_sync(unsigned, T value, int source) { return emulated_shuffle(value, source & 31); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) { return emulated_shuffle(value, emulated::self().lane ^ mask); }
template <class T>
T __shfl_down_sync(unsigned, T value, int by) {
  const int lane = emulated::self().lane;
  return emulated_shuffle(value, lane + by < 32 ? lane + by : lane);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  unsigned word = predicate != 0, result = 0;
  auto* slots = emulated::exchange(&word, 1);
  for (int i = 0; i < emulated::self().warp->size; ++i) result |= slots[i][0] << i;
  return result;
}
template <class F>
unsigned emulated_reduce(unsigned value, F combine) {
  auto* slots = emulated::exchange(&value, 1);
  for (int i = 0; i < emulated::self().warp->size; ++i) value = combine(value, slots[i][0]);
  return value;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) { return emulated_reduce(value, [](unsigned a, unsigned b) { return b > a ? b : a; }); }
inline unsigned __reduce_or_sync(unsigned, unsigned value) { return emulated_reduce(value, std::bit_or<unsigned>()); }
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

template <class T>
T atomicAdd(T* place, T value) { T old = *place; *place += value; return old; }
template <class T>
T atomicMax(T* place, T value) { T old = *place; if (value > old) *place = value; return old; }
template <class T>
T __ldg(const T* place) { return *place; }
template <class T>
T min(T a, T b) { return b < a ? b : a; }
template <class T>
T max(T a, T b) { return a < b ? b : a; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float rsqrtf(float a) { return 1.0f / std::sqrt(a); }
inline float __expf(float a) { return std::exp(a); }
template <class T, class U>
T emulated_bits(U value) { T result; static_assert(sizeof(T) == sizeof(U)); std::memcpy(&result, &value, sizeof(T)); return result; }
inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }

// What cuda_src/ptx.cuh has as inline PTX, under the same names.
namespace ptx {
using u16 = unsigned short;
using u32 = unsigned;

inline float half_to_float(u16 h) { return float(emulated_bits<_Float16>(h)); }
inline u16 float_to_half(float x) { return emulated_bits<u16>(_Float16(x)); }
inline float bfloat_to_float(u16 b) { return emulated_bits<float>(u32(b) << 16); }
inline u16 float_to_bfloat(float x) {
  u32 bits = emulated_bits<u32>(x);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return u16(bits >> 16 | 0x40);
  return u16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline u32 pack_half(float low, float high) { return float_to_half(low) | u32(float_to_half(high)) << 16; }
inline u32 pack_bfloat(float low, float high) { return float_to_bfloat(low) | u32(float_to_bfloat(high)) << 16; }
inline float2 unpack_half(u32 x) { return {half_to_float(u16(x)), half_to_float(u16(x >> 16))}; }
inline float2 unpack_bfloat(u32 x) { return {bfloat_to_float(u16(x)), bfloat_to_float(u16(x >> 16))}; }
inline u32 mul_half2(u32 a, u32 b) {
  float2 x = unpack_half(a), y = unpack_half(b);
  return pack_half(x.x * y.x, x.y * y.y);
}
inline u32 add_half2(u32 a, u32 b) {
  float2 x = unpack_half(a), y = unpack_half(b);
  return pack_half(x.x + y.x, x.y + y.y);
}
inline u32 fma_half2(u32 a, u32 b, u32 c) {
  float2 x = unpack_half(a), y = unpack_half(b), z = unpack_half(c);
  auto fma1 = [](float p, float q, float r) { return emulated_bits<u16>(_Float16(double(p) * q + r)); };
  return fma1(x.x, y.x, z.x) | u32(fma1(x.y, y.y, z.y)) << 16;
}
inline u32 neg_half2(u32 a) { return a ^ 0x80008000u; }
inline float exp2(float x) { return std::exp2(x); }
inline u32 prmt(u32 a, u32 b, u32 selector) {
  unsigned char bytes[8];
  std::memcpy(bytes, &a, 4);
  std::memcpy(bytes + 4, &b, 4);
  u32 result = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 nibble = selector >> 4 * i & 15, byte = bytes[nibble & 7];
    result |= (nibble < 8 ? byte : byte & 0x80 ? 0xFFu : 0u) << 8 * i;  // from 8 on, the sign alone
  }
  return result;
}
inline u32 pick(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }

template <float (*Widen)(u16)>
void mma_any(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 words[6] = {a0, a1, a2, a3, b0, b1};
  auto* slots = emulated::exchange(words, 6);
  const int lane = emulated::self().lane, row = lane / 4, col = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int m = row + 8 * (i >> 1), n = 2 * col + (i & 1);
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const u32 a = slots[m % 8 * 4 + k % 8 / 2][k / 8 * 2 + m / 8], b = slots[n * 4 + k % 8 / 2][4 + k / 8];
      sum += double(Widen(u16(a >> 16 * (k & 1)))) * Widen(u16(b >> 16 * (k & 1)));
    }
    c[i] = float(sum);
  }
}
inline void mma_half(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { mma_any<half_to_float>(c, a0, a1, a2, a3, b0, b1); }
inline void mma_bfloat(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) { mma_any<bfloat_to_float>(c, a0, a1, a2, a3, b0, b1); }

// 8 x 8 numbers of 16 bits: lane i holds row i / 4, columns 2 (i % 4) and the next.
inline u32 transpose8x8(u32 x) {
  auto* slots = emulated::exchange(&x, 1);
  const int lane = emulated::self().lane, row = lane / 4, col = lane % 4 * 2;
  auto at = [&](int r, int c) { return slots[r * 4 + c / 2][0] >> 16 * (c & 1) & 0xFFFF; };
  return at(col, row) | at(col + 1, row) << 16;
}

// Four 8 x 8 matrices: lane i gives the address of row i % 8 of matrix i / 8.
inline void load_matrix4(u32* out, const void* row, bool transposed = false) {
  u32 words[2];
  std::memcpy(words, &row, 8);
  auto* slots = emulated::exchange(words, 2);
  const int lane = emulated::self().lane;
  for (int i = 0; i < 4; ++i) {
    auto at = [&](int r, int c) {
      const u16* place;
      std::memcpy(&place, slots[8 * i + r], 8);
      return u32(place[c]);
    };
    const int r = lane / 4, c = lane % 4 * 2;
    out[i] = transposed ? at(c, r) | at(c + 1, r) << 16 : at(r, c) | at(r, c + 1) << 16;
  }
}
inline void load_matrix4_transposed(u32* out, const void* row) { load_matrix4(out, row, true); }
using Shared = const unsigned char*;
inline Shared shared_address(const void* place) { return static_cast<Shared>(place); }
inline uint2 load_shared8(Shared place) { return *reinterpret_cast<const uint2*>(place); }
inline uint4 load_shared16(Shared place) { return *reinterpret_cast<const uint4*>(place); }
// The same of two.
inline void load_matrix2_transposed(u32* out, const void* row) {
  u32 all[4];
  load_matrix4(all, row, true);
  out[0] = all[0];
  out[1] = all[1];
}
inline void sync_threads(int name, int threads) { emulated::wait(emulated::block().named[name], threads); }

inline void copy_async(void* target, const void* source, int wanted, int bytes) {
  emulated::self().open.push_back({target, source, bytes, wanted});
}
// 16 bytes from global to shared memory; of them the first `wanted`, the rest are zeros.
inline void copy_async16(void* shared, const void* global, int wanted = 16) { copy_async(shared, global, wanted, 16); }
inline unsigned long long read_once() { return 0; }
inline void copy_async16(void* shared, const void* global, unsigned long long) { copy_async(shared, global, 16, 16); }
inline void commit_copies() {
  emulated::self().groups.push_back(emulated::self().open);
  emulated::self().open.clear();
}
// Wait until at most N groups of the calling thread's copies are under way.
template <int N>
void wait_copies() {
  auto& groups = emulated::self().groups;
  while (int(groups.size()) > N) {
    for (auto& copy : groups.front()) {
      std::memset(copy.target, 0, copy.bytes);
      std::memcpy(copy.target, copy.source, copy.wanted);
    }
    groups.pop_front();
  }
}
inline void keep_order() {}
inline u32 as_new(u32 x) { return x; }
inline const unsigned char* as_base(const unsigned char* place) { return place; }
inline uint4 load_stream(const void* place) { return *static_cast<const uint4*>(place); }
inline void prefetch(const void*) {}
inline uint2 load_stream8(const void* place) { return *static_cast<const uint2*>(place); }
inline long long load_early(const long long* place) { return *place; }
inline u32 load_early(const unsigned char* place) { return *place; }
inline float load_early(const float* place) { return *place; }

// Kernels run one after the other.
inline void wait_for_previous() {}
inline void let_next_start() {}

template <class V> void store_relaxed(V* place, const V& v) { *place = v; }
template <class V> V load_relaxed(V* place) { return *place; }
template <class V> void load_relaxed_if(V& v, const V* place, u32 wanted) { if (wanted) v = *place; }
}  // namespace ptx

#include "bulk_copies.hpp"
