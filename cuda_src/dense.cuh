// Dense pages: f32, f16 or bf16 rows by token. Twin of kvrt/kvstore/codecs/dense.py. They need no tile: any dim fits.
#pragma once
#include "codec.cuh"

KVRT_INLINE void dense_encode(const Part& part, const Source& source) {
  const int kind = part.own(0), dim = source.dim;
  each_number(dim, [&](int t, int c) {
    store_number(part.codes(), kind, t * dim + c, source.at(part.head, t, c));
  });
}

KVRT_INLINE float dense_number(const Part& part, int dim, int t, int c) {
  return load_number(part.codes(), part.own(0), t * dim + c);
}
