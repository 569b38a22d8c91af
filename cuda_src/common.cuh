// What all kernels share: sizes of integers, and the instructions of a real or an emulated device.
#pragma once

#ifdef KVRT_EMULATED
#include "emulated.hpp"
#define KVRT_INLINE inline
#else
#include "ptx.cuh"
#endif

// From sm_90 on a copy engine brings large runs: one lane asks, and the bytes count down a barrier in shared memory.
#ifndef KVRT_BULK_COPIES
#if __CUDA_ARCH__ >= 900
#define KVRT_BULK_COPIES 1
#else
#define KVRT_BULK_COPIES 0
#endif
#endif

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using u64 = unsigned long long;
using i64 = long long;

static constexpr int WARP = 32;
static constexpr u32 ALL_LANES = 0xFFFFFFFFu;
