// What all kernels share: sizes of integers, and the instructions of a real or an emulated device.
#pragma once

#ifdef KVRT_EMULATED
#include "emulated.hpp"
#define KVRT_INLINE inline
#else
#include "ptx.cuh"
#endif

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned;
using i64 = long long;

static constexpr int WARP = 32;
static constexpr u32 ALL_LANES = 0xFFFFFFFFu;
