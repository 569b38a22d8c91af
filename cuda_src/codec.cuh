// What the functions of all codecs are given.
#pragma once
#include "fragment.cuh"

// One head's part of one side of a page. `side` are the side's settings (kvrt/backends/view.py), `run` the head's own
// bytes of the page, `shared` those of all heads.
struct Part {
  const i64* side;
  int is_value, head, heads;
  u8 *run, *shared;

  KVRT_INLINE int own(int i) const { return int(side[VIEW_OWN + i]); }
  KVRT_INLINE u8* codes() const { return run + side[VIEW_CODES]; }
  KVRT_INLINE u16* meta() const { return reinterpret_cast<u16*>(run + side[VIEW_META]); }
  KVRT_INLINE float* state() const { return reinterpret_cast<float*>(side[VIEW_STATE]); }
  KVRT_INLINE const float* table() const { return reinterpret_cast<const float*>(side[VIEW_TABLE]); }
};
