// Conversions whose every bit is that of the CPU kernels (kvrt/backends/cpu_math.py), NaNs included.
#pragma once
#include "common.cuh"

static constexpr int PAGE_TOKENS = 64;
static constexpr int THREADS = 256;  // of a block that seals, surveys or gathers

enum Kind { F32 = 0, F16 = 1, BF16 = 2 };
static constexpr float LARGEST_HALF = 65504.0f;

// The conversion instructions give every NaN the same bits; a CPU keeps its sign and payload.
KVRT_INLINE float half_value(u16 half) {
  if ((half & 0x7FFF) <= 0x7C00) return ptx::half_to_float(half);
  return __uint_as_float(u32(half & 0x8000) << 16 | 0x7FC00000u | u32(half & 0x3FF) << 13);
}

// Round to nearest even; what is too large becomes infinite.
KVRT_INLINE u16 half_bits(float x) {
  const u32 bits = __float_as_uint(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return u16((bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x3FF));
  return ptx::float_to_half(x);
}

// Round to nearest even; what is too large becomes the largest half. A NaN passes.
KVRT_INLINE u16 held_half_bits(float x) {
  x = x > LARGEST_HALF ? LARGEST_HALF : x;
  x = x < -LARGEST_HALF ? -LARGEST_HALF : x;
  return half_bits(x);
}

// a / b; a NaN passes as it is, where a GPU's division would give it other bits.
KVRT_INLINE float quotient(float a, float b) { return a == a ? __fdiv_rn(a, b) : a; }

KVRT_INLINE int kind_bytes(int kind) { return kind == F32 ? 4 : 2; }

// Number i of stored floats of a kind.
KVRT_INLINE float load_number(const u8* row, int kind, int i) {
  if (kind == F32) return reinterpret_cast<const float*>(row)[i];
  const u16 bits = reinterpret_cast<const u16*>(row)[i];
  return kind == F16 ? half_value(bits) : ptx::bfloat_to_float(bits);
}

KVRT_INLINE void store_number(u8* row, int kind, int i, float x) {
  if (kind == F32)
    reinterpret_cast<float*>(row)[i] = x;
  else
    reinterpret_cast<u16*>(row)[i] = kind == F16 ? held_half_bits(x) : ptx::float_to_bfloat(x);
}

// What x is once stored in a kind.
KVRT_INLINE float rounded(float x, int kind) {
  if (kind == F16) return half_value(held_half_bits(x));
  return kind == BF16 ? ptx::bfloat_to_float(ptx::float_to_bfloat(x)) : x;
}
