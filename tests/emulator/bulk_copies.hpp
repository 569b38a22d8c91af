// Copies by the copy engine, emulated. Until they are waited for their targets hold NaNs: the bytes may come at any time.
#pragma once
#include "emulated.hpp"

namespace ptx {
struct BulkBarrier {
  unsigned expected = 0, phases = 0;
  std::vector<emulated::Copy> copies;
};
inline BulkBarrier& bulk_barrier(void* place) {
  static std::map<void*, BulkBarrier> all;
  return all[place];
}
inline void demand(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "emulator: %s\n", what);
  std::abort();
}
inline void barrier_init(void* barrier) { bulk_barrier(barrier) = {}; }
inline void barriers_are_made() {}
inline void barrier_expect(void* barrier, u32 bytes) {
  demand(bulk_barrier(barrier).expected == 0, "a barrier is armed twice");
  bulk_barrier(barrier).expected = bytes;
}
inline void copy_bulk(void* shared, const void* global, u32 bytes, void* barrier) {
  const auto low_bits = reinterpret_cast<std::uintptr_t>(shared) | reinterpret_cast<std::uintptr_t>(global) | bytes;
  demand(low_bits % 16 == 0, "a bulk copy's addresses and size are multiples of 16");
  std::memset(shared, 0xFF, bytes);
  bulk_barrier(barrier).copies.push_back({shared, global, int(bytes), int(bytes)});
}
inline void barrier_wait(void* place, u32 parity) {
  BulkBarrier& barrier = bulk_barrier(place);
  while ((barrier.phases & 1) == parity) {
    if (barrier.copies.empty()) {  // another thread is yet to ask for them
      emulated::yield();
      continue;
    }
    for (const auto& copy : barrier.copies) {
      std::memcpy(copy.target, copy.source, copy.bytes);
      barrier.expected -= copy.bytes;
    }
    demand(barrier.expected == 0, "other bytes were copied than the barrier expects");
    barrier.copies.clear();
    ++barrier.phases;
  }
}
inline void order_copies() {}
}  // namespace ptx
