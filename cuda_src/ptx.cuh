// Instructions that C++ has no words for, as inline PTX. No CUDA headers: NVRTC may have none.
#pragma once

#define KVRT_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

namespace ptx {
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;

#define KVRT_INLINE __device__ __forceinline__

KVRT_INLINE float half_to_float(u16 h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}
// The instruction for two: where only a byte of what that for one gives is stored, NVRTC 13.0 stores the number's
// whole part instead.
KVRT_INLINE u16 float_to_half(float x) {
  u32 h;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(0.0f), "f"(x));
  return u16(h);
}
KVRT_INLINE float bfloat_to_float(u16 b) { return __uint_as_float(u32(b) << 16); }
// Round to nearest even; NaN stays NaN.
KVRT_INLINE u16 float_to_bfloat(float x) {
  const u32 bits = __float_as_uint(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return u16(bits >> 16 | 0x40);
  return u16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
// Two numbers as one register: the first in its low half.
KVRT_INLINE u32 pack_half(float low, float high) {
  u32 x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
KVRT_INLINE u32 pack_bfloat(float low, float high) {
  u32 x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
}
KVRT_INLINE float2 unpack_half(u32 x) { return {half_to_float(u16(x)), half_to_float(u16(x >> 16))}; }
KVRT_INLINE float2 unpack_bfloat(u32 x) { return {__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u)}; }
KVRT_INLINE u32 mul_half2(u32 a, u32 b) {
  u32 x;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}
KVRT_INLINE u32 add_half2(u32 a, u32 b) {
  u32 x;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}
KVRT_INLINE u32 fma_half2(u32 a, u32 b, u32 c) {
  u32 x;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
  return x;
}
KVRT_INLINE u32 neg_half2(u32 a) {
  u32 x;
  asm("neg.f16x2 %0, %1;" : "=r"(x) : "r"(a));
  return x;
}
KVRT_INLINE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KVRT_INLINE u32 prmt(u32 a, u32 b, u32 selector) {
  u32 x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(selector));
  return x;
}
// Bits of a where mask has ones, else of b. In C++, where such bits are known to be zeros, it becomes two instructions.
KVRT_INLINE u32 pick(u32 mask, u32 a, u32 b) {
  u32 x;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(x) : "r"(mask), "r"(a), "r"(b));
  return x;
}

// c (16 x 8, f32) += a (16 x 16) b (16 x 8).
KVRT_INLINE void mma_half(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
KVRT_INLINE void mma_bfloat(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 8 x 8 numbers of 16 bits: lane i holds row i / 4, columns 2 (i % 4) and the next.
KVRT_INLINE u32 transpose8x8(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// A place in shared memory as loads take it.
using Shared = u32;
KVRT_INLINE Shared shared_address(const void* place) { return u32(__cvta_generic_to_shared(place)); }
KVRT_INLINE uint2 load_shared8(Shared place) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(place));
  return x;
}

KVRT_INLINE uint4 load_shared16(Shared place) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(place));
  return x;
}

// Four 8 x 8 matrices: lane i gives the address of row i % 8 of matrix i / 8.
KVRT_INLINE void load_matrix4(u32* out, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}
KVRT_INLINE void load_matrix4_transposed(u32* out, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}
// The same of two, of which the first 16 lanes give addresses.
KVRT_INLINE void load_matrix2_transposed(u32* out, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(shared_address(row))
               : "memory");
}
// Until so many threads have come to a barrier of a number from 1 to 15.
KVRT_INLINE void sync_threads(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// 16 bytes from global to shared memory; of them the first `wanted`, the rest are zeros.
KVRT_INLINE void copy_async16(void* shared, const void* global, int wanted = 16) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(wanted)
               : "memory");
}
// The same of bytes that are read once: the second-level cache keeps others rather than these.
KVRT_INLINE u64 read_once() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
KVRT_INLINE void copy_async16(void* shared, const void* global, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "l"(policy)
               : "memory");
}
KVRT_INLINE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most N groups of the calling thread's copies are under way.
template <int N>
KVRT_INLINE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// Loads that come after it in the source are not begun before it: they would take registers.
KVRT_INLINE void keep_order() { asm volatile("" ::: "memory"); }
// A number that the compiler does not know the making of: what follows from it is not kept from round to round.
KVRT_INLINE u32 as_new(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
// An address that the compiler does not know the making of: what lies a constant behind it needs no address of its own.
KVRT_INLINE const unsigned char* as_base(const unsigned char* place) {
  asm("" : "+l"(place));
  return place;
}
// 16 bytes that are read once.
KVRT_INLINE uint4 load_stream(const void* place) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(place));
  return v;
}
// A line of 128 bytes will be wanted: into the second-level cache.
KVRT_INLINE void prefetch(const void* place) { asm volatile("prefetch.global.L2 [%0];" ::"l"(place)); }
KVRT_INLINE uint2 load_stream8(const void* place) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(place));
  return v;
}
// Loads that are begun where the source has them, not where what they bring is wanted.
KVRT_INLINE long long load_early(const long long* place) {
  long long x;
  asm volatile("ld.global.b64 %0, [%1];" : "=l"(x) : "l"(place));
  return x;
}
KVRT_INLINE u32 load_early(const unsigned char* place) {
  u32 x;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(x) : "l"(place));
  return x;
}
KVRT_INLINE float load_early(const float* place) {
  float x;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(place));
  return x;
}

// Launches that overlap (kvrt/backends/dependent_launch.py). From here on, all that earlier kernels of the
// stream wrote is there. Without such a launch, and before sm_90, there is nothing to wait for.
KVRT_INLINE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// When every block has called it or ended, the next kernel may begin, up to its wait.
KVRT_INLINE void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Numbers that CTAs hand over while they run: each word is complete when it is seen at all.
KVRT_INLINE void store_relaxed(float2* place, const float2& v) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1,%2};" ::"l"(place), "f"(v.x), "f"(v.y) : "memory");
}
KVRT_INLINE void store_relaxed(float4* place, const float4& v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(place), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
KVRT_INLINE float2 load_relaxed(const float2* place) {
  float2 v;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(place) : "memory");
  return v;
}

// The same where `wanted` is not 0; else v stays as it is.
KVRT_INLINE void load_relaxed_if(float2& v, const float2* place, u32 wanted) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %3, 0;\n@wanted ld.relaxed.gpu.global.v2.f32 {%0,%1}, [%2];\n}"
      : "+f"(v.x), "+f"(v.y)
      : "l"(place), "r"(wanted)
      : "memory");
}
KVRT_INLINE void load_relaxed_if(float4& v, const float4* place, u32 wanted) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n"
      "@wanted ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];\n}"
      : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)
      : "l"(place), "r"(wanted)
      : "memory");
}

#if __CUDA_ARCH__ >= 900
// Copies by the copy engine: one lane asks, and bytes that have come count down a barrier in shared memory.
KVRT_INLINE void barrier_init(u64* barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
KVRT_INLINE void barriers_are_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
KVRT_INLINE void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
KVRT_INLINE void copy_bulk(void* shared, const void* global, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
KVRT_INLINE void barrier_wait(u64* barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain%=:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again%=;\n}" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}
// What this thread wrote to shared memory comes before copies that are asked for later.
KVRT_INLINE void order_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif
}  // namespace ptx
