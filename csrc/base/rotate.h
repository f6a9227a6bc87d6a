// Rotations of rows: a Hadamard transform, which spreads an outlier over many values. The product of two rotated rows
// is that of the originals, times the size of the rotation, and bytes represent rotated rows better.
//
// A row is [size][depth / size], and each of its columns is transformed by additions of neighbours in a fixed order, so
// that every level has the same bits.
#pragma once

#include <cstdint>

#include "base/tile.h"

namespace tilewright {
namespace {

// The largest power of two that divides a row of `depth` values, up to 256.
TILEWRIGHT_INLINE int64_t rotation_size(int64_t depth) {
  const int64_t power = depth & -depth;
  return power < 256 ? power : 256;
}

inline void rotate(float* values, int64_t depth) {
  // `apart` is the distance of two values that are added; two stages at a time.
  int64_t apart = depth / rotation_size(depth);
  for (; apart * 4 <= depth; apart *= 4)
    for (float* first = values; first < values + depth; first += apart * 4) {
      float *a = first, *b = a + apart, *c = b + apart, *d = c + apart;
#pragma GCC ivdep
      for (int64_t i = 0; i < apart; ++i) {
        const float ab = a[i] + b[i], a_b = a[i] - b[i], cd = c[i] + d[i], c_d = c[i] - d[i];
        a[i] = ab + cd;
        b[i] = a_b + c_d;
        c[i] = ab - cd;
        d[i] = a_b - c_d;
      }
    }
  if (apart == depth) return;
  float* upper = values + apart;
#pragma GCC ivdep
  for (int64_t i = 0; i < apart; ++i) {
    const float a = values[i], b = upper[i];
    values[i] = a + b;
    upper[i] = a - b;
  }
}

}  // namespace
}  // namespace tilewright
