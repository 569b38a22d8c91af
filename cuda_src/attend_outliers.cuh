// Numbers that non-uniform integers keep exact beside the codes: they are put into the tiles of decoded numbers.
//
// A register whose number is known only when running cannot be written. So tiles go through shared memory, in fragment
// order, where an outlier is one store of 16 bits by the lane that found it, whichever lane has it in a register.
#pragma once
#include "attend_levels.cuh"

// The registers of a tile, in shared memory.
static constexpr int TILE_BYTES = WARP * 16;

KVRT_INLINE void write_tile(u8* tile, const u32 (&a)[4]) {
  reinterpret_cast<uint4*>(tile)[threadIdx.x % WARP] = {a[0], a[1], a[2], a[3]};
}
KVRT_INLINE void read_tile(u32 (&a)[4], const u8* tile) {
  const uint4 x = reinterpret_cast<const uint4*>(tile)[threadIdx.x % WARP];
#pragma unroll
  for (int r = 0; r < 4; ++r) a[r] = word_of(x, r);
}

// `count` tiles of numbers go to the room, with the outliers of the tiles from `first` on in their places.
template <class Outliers>
KVRT_INLINE void write_with_outliers(const u32 (&a)[Outliers::GROUP][4], const Outliers& outliers, int first,
                                     int count) {
#pragma unroll
  for (int i = 0; i < count; ++i) write_tile(outliers.room + i * TILE_BYTES, a[i]);
  __syncwarp();
  outliers.put(first, count);
  __syncwarp();
}

#if K_CODEC == 4 && K_SLOTS > 0
// A lane's outliers of the keys of a page. Tiles are counted 16 tokens by 16 tokens, in the order of `tile_at`.
struct KeyOutliers {
  static constexpr int GROUP = WARP_BYTES / TILE_BYTES;  // tiles that there is room for
  static constexpr int COUNT = (K_SLOTS + WARP - 1) / WARP;
  // If a number is this large at most, those that it becomes when it is rotated, by an amplitude up to 1.4, are halves.
  static constexpr u32 MOST = FORM == VIEW_PRE ? 0x7800 : 0x7BFF;
  u8* room;
  u16 values[COUNT];
  u32 places[COUNT];

  // `swaps`: whether tiles that are not turned have swapped columns.
  KVRT_INLINE KeyOutliers(const u8* run, u8* room, bool swaps) : room(room) {
    const u32* slots = reinterpret_cast<const u32*>(run + K_META_OFFSET);
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      const int i = n * WARP + threadIdx.x % WARP;
      const u32 slot = i < K_SLOTS ? slots[i] : ~0u;
      const u32 index = slot >> 16, t = index / HEAD_DIM, c = index % HEAD_DIM;
      const u32 above = c >= HALF, s = c / 8 - above * TILES;
      const bool slow = s >= TURNED_TILES, swapped = swaps && (slow || FORM != VIEW_PRE);
      const u32 tile = t / 16 * TILES + (slow ? s - TURNED_TILES : s + TILES - TURNED_TILES);
      const u32 column = c % 8 / 2 * 16 + (swapped ? c % 2 * 8 + above * 2 : above * 8 + c % 2 * 2);
      values[n] = u16(min(slot & 0x7FFFu, MOST) | (slot & 0x8000u));
      places[n] = tile * TILE_BYTES + t % 8 * 64 + t / 8 % 2 * 4 + column;  // an unused slot is beyond all tiles
    }
  }

  // Put them into `count` tiles that are in the room, from the page's tile `first` on.
  KVRT_INLINE void put(int first, int count) const {
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      const u32 place = places[n] - first * TILE_BYTES;
      if (place < u32(count) * TILE_BYTES) *reinterpret_cast<u16*>(room + place) = values[n];
    }
  }
};
#endif

#if V_CODEC == 4 && V_SLOTS > 0
// Outliers of the values of 16 tokens of a page, of all heads: a lane has half of those of a token.
struct ValueOutliers {
  static constexpr int GROUP = VALUE_ROOM / TILE_BYTES;  // tiles of channels that there is room for
  static constexpr int HELD = V_SLOTS <= 6 ? V_SLOTS : 0;  // slots that stay in registers
  u8* room;
  const u32 *all, *slots;  // of the lane's token of the first 16; of the one that was taken up
  u32 held[HELD > 0 ? HELD : 1], places[HELD > 0 ? HELD : 1];
  u32 first, mine;  // the head's first channel, and where the lane's token is in the room

  KVRT_INLINE ValueOutliers(const u8* run, u8* room, int head, bool swaps)
      : room(room), first(head * HEAD_DIM * CHANNEL) {
    const int lane = threadIdx.x % WARP, t = lane % 16, above = t / 8, one = t % 2;
    all = slots = reinterpret_cast<const u32*>(run + RUN_BYTES + 64 * 4) + (2 * t + lane / 16) * V_SLOTS;
    mine = t % 8 / 2 * 16 + (swaps ? one * 8 + above * 2 : above * 8 + one * 2) - head * TILES * TILE_BYTES;
  }

  // Take up those of the tokens 16 j ... 16 j + 15.
  KVRT_INLINE void take(int j) {
    slots = all + j * 16 * 2 * V_SLOTS;
#pragma unroll
    for (int n = 0; n < HELD; ++n) {
      held[n] = slots[n];
      places[n] = place_of(held[n]);
    }
  }

  // Put them into `count` tiles of channels that are in the room, from s on.
  KVRT_INLINE void put(int s, int count) const {
#pragma unroll
    for (int n = 0; n < HELD; ++n) put_one(held[n], places[n], s, count);
#pragma unroll 4
    for (int n = HELD; n < V_SLOTS; ++n) put_one(slots[n], place_of(slots[n]), s, count);
  }

 private:
  static constexpr u32 CHANNEL = 1 << 16;  // in a slot, whose low half is the number

  // Of a slot: 16 channels are a tile, the eighth is one register further.
  KVRT_INLINE u32 place_of(u32 slot) const {
    return mine + ((slot >> 11 & 0xFFFFFE00u) | (slot >> 10 & 0x1C0) | (slot >> 17 & 4));
  }

  KVRT_INLINE void put_one(u32 slot, u32 place, int s, int count) const {
    if (slot - first - 16 * s * CHANNEL < 16 * count * CHANNEL)
      *reinterpret_cast<u16*>(room + place - s * TILE_BYTES) = u16(slot);
  }
};
#endif
