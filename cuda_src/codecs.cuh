// Which codec's functions a side of a page runs, chosen by its settings. Twin of kvrt/kvstore/codecs/dispatch.py.
#pragma once
#include "blocks.cuh"
#include "dense.cuh"
#include "fp8.cuh"
#include "intq.cuh"
#include "nuq.cuh"
#include "vq.cuh"

enum CodecNumber { DENSE = 0, INTQ = 1, BLOCKS = 2, FP8 = 3, NUQ = 4, VQ = 5 };

// Look at all heads of a page before any is encoded. The blocks of a page share heads or tokens among them.
KVRT_INLINE void survey_page(const Part& part, const Source& source, int first) {
  const int codec = int(part.side[VIEW_CODEC]);
  if (codec == INTQ) {
    intq_survey(part, source, blockIdx.y, gridDim.y);
  } else if (codec == FP8) {
    if (first) fp8_survey(part, source, blockIdx.y, gridDim.y);
  } else if (codec == NUQ) {
    const int warps = THREADS / WARP;
    nuq_survey(part, source, blockIdx.y * warps + threadIdx.x / WARP, gridDim.y * warps);
  }
}

// Write one head's part of a page. A dense side uses no tile; `room` is a second one where whole heads are quantised.
KVRT_INLINE void encode(const Part& part, const Source& source, const Tile& tile, const Tile& room) {
  const int codec = int(part.side[VIEW_CODEC]);
  if (codec == DENSE) {
    dense_encode(part, source);
    return;
  }
  each_number(tile.dim, [&](int t, int c) { tile.at(t, c) = source.at(part.head, t, c); });
  __syncthreads();
  if (codec == INTQ)
    intq_encode(part, tile);
  else if (codec == BLOCKS)
    block_encode(part, tile);
  else if (codec == FP8)
    fp8_encode(part, tile);
  else if (codec == VQ)
    vq_encode(part, tile, room);
  else
    nuq_encode(part, source, tile);
}

// Read one head's part of a packed side into the tile, for all threads to see.
KVRT_INLINE void decode(const Part& part, const Tile& tile) {
  const int codec = int(part.side[VIEW_CODEC]);
  if (codec == INTQ)
    intq_decode(part, tile);
  else if (codec == BLOCKS)
    block_decode(part, tile);
  else if (codec == FP8)
    fp8_decode(part, tile);
  else if (codec == VQ)
    vq_decode(part, tile);
  else
    nuq_decode(part, tile);
  __syncthreads();
}
