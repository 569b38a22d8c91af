// Numbers that non-uniform integers keep exact beside the codes: they are put into the tiles of decoded numbers.
//
// A register whose number is known only when running cannot be written. So tiles go through shared memory, in fragment
// order, where an outlier is one store of 16 bits by the lane that found it, whichever lane has it in a register.
#pragma once
#include "attend_levels.cuh"

// The registers of a tile, in shared memory: 512 bytes.
KVRT_INLINE void write_tile(u8* tile, const u32 (&a)[4]) {
  reinterpret_cast<uint4*>(tile)[threadIdx.x % WARP] = {a[0], a[1], a[2], a[3]};
}
KVRT_INLINE void read_tile(u32 (&a)[4], const u8* tile) {
  const uint4 x = reinterpret_cast<const uint4*>(tile)[threadIdx.x % WARP];
#pragma unroll
  for (int r = 0; r < 4; ++r) a[r] = word_of(x, r);
}

#if K_CODEC == 4
// A lane's outliers of the keys of a page. Tiles are [s][j].
struct KeyOutliers {
  // Tiles of channels that there is room for.
  static constexpr int GROUP = KEY_OUTLIERS && WARP_BYTES >= 2 * KEY_ROOM ? 2 : 1;
  static constexpr int COUNT = K_SLOTS > 0 ? (K_SLOTS + WARP - 1) / WARP : 1;
  // If a number is this large at most, those that it becomes when it is rotated, by an amplitude up to 1.4, are halves.
  static constexpr u32 MOST = FORM == VIEW_PRE ? 0x7800 : 0x7BFF;
  u8* room;
  u16 values[COUNT];
  u32 places[COUNT];

  KVRT_INLINE KeyOutliers(const u8* run, u8* room) : room(room) {
    const u32* slots = reinterpret_cast<const u32*>(run + K_META_OFFSET);
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      const int i = n * WARP + threadIdx.x % WARP;
      const u32 slot = i < K_SLOTS ? slots[i] : ~0u;
      const u32 index = slot >> 16, t = index / HEAD_DIM, c = index % HEAD_DIM;
      const u32 above = c >= HALF, pair = above ? c - HALF : c, lane = t % 8 * 4 + pair % 8 / 2;
      values[n] = u16(min(slot & 0x7FFFu, MOST) | (slot & 0x8000u));
      places[n] = pair / 8 * KEY_ROOM + t / 16 * 512 + lane * 16 + above * 8 + t / 8 % 2 * 4 + pair % 2 * 2;
      if (index >= 64 * HEAD_DIM) places[n] = ~0u;
    }
  }

  // Put them into GROUP tiles of channels from s on.
  KVRT_INLINE void put(u32 (&a)[GROUP][4][4], int s) const {
#pragma unroll
    for (int i = 0; i < 4 * GROUP && s + i / 4 < TILES; ++i) write_tile(room + i * 512, a[i / 4][i % 4]);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      const u32 place = places[n] - s * KEY_ROOM;
      if (place < GROUP * KEY_ROOM) *reinterpret_cast<u16*>(room + place) = values[n];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4 * GROUP && s + i / 4 < TILES; ++i) read_tile(a[i / 4][i % 4], room + i * 512);
  }
};
#endif

#if V_CODEC == 4
// Outliers of the values of a page. A lane has those of one token of 32, of all heads. Tiles are [s][j], j = 0, 1.
struct ValueOutliers {
  static constexpr int GROUP = 4;                          // tiles of channels that there is room for
  static constexpr int HELD = V_SLOTS <= 6 ? V_SLOTS : 0;  // pairs of slots that stay in registers
  u8* room;
  const uint2 *all, *slots;  // of the lane's token of the first 32; of the one that was taken up
  uint2 held[HELD > 0 ? HELD : 1], places[HELD > 0 ? HELD : 1];
  u32 first, mine;  // the head's first channel, and where the lane's token is in the room

  KVRT_INLINE ValueOutliers(const u8* run, u8* room, int head) : room(room), first(head * HEAD_DIM * CHANNEL) {
    const int t = threadIdx.x % WARP;
    all = slots = reinterpret_cast<const uint2*>(run + RUN_BYTES + 64 * 4) + t * V_SLOTS;
    mine = t / 16 * 512 + t % 8 / 2 * 16 + t / 8 % 2 * 8 + t % 2 * 2;
  }

  // Take up the tokens 32 part ... 32 part + 31.
  KVRT_INLINE void take(int part) {
    slots = all + part * WARP * V_SLOTS;
#pragma unroll
    for (int n = 0; n < HELD; ++n) {
      held[n] = pair(n);
      places[n] = {place_of(held[n].x), place_of(held[n].y)};
    }
  }

  // Put them into GROUP tiles of channels from s on.
  KVRT_INLINE void put(u32 (&a)[GROUP][2][4], int s) const {
#pragma unroll
    for (int i = 0; i < 2 * GROUP && s + i / 2 < TILES; ++i) write_tile(room + i * 512, a[i / 2][i % 2]);
    __syncwarp();
#pragma unroll
    for (int n = 0; n < HELD; ++n) {
      put_one(held[n].x, places[n].x, s);
      put_one(held[n].y, places[n].y, s);
    }
#pragma unroll 4
    for (int n = HELD; n < V_SLOTS; ++n) {
      const uint2 two = pair(n);
      put_one(two.x, place_of(two.x), s);
      put_one(two.y, place_of(two.y), s);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2 * GROUP && s + i / 2 < TILES; ++i) read_tile(a[i / 2][i % 2], room + i * 512);
  }

 private:
  static constexpr u32 CHANNEL = 1 << 16;  // in a slot, whose low half is the number

  // Two slots, their channels counted from the head's first.
  KVRT_INLINE uint2 pair(int n) const { return {slots[n].x - first, slots[n].y - first}; }

  // Of a slot whose channels are the head's: 16 channels are 1024 bytes, the eighth is one register further.
  KVRT_INLINE u32 place_of(u32 slot) const { return mine + (slot >> 10 & 0xFFFFFDC0u) + (slot >> 17 & 4); }

  KVRT_INLINE void put_one(u32 slot, u32 place, int s) const {
    const u32 width = 16 * (TILES - s < GROUP ? TILES - s : GROUP);
    if (slot - 16 * s * CHANNEL < width * CHANNEL) *reinterpret_cast<u16*>(room + place - 1024 * s) = u16(slot);
  }
};
#endif
