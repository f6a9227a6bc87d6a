// Comparisons of Vec lanes as bits. Include after base/vec/scalar.h; the other levels define the same names.
#pragma once

#include <cstdint>

namespace tilewright {
namespace {

// Bit i is set where a[i] >= b[i].
inline uint32_t lanes_at_least(Vec a, Vec b) {
  uint32_t lanes = 0;
  for (int i = 0; i < Vec::kLanes; ++i) lanes |= static_cast<uint32_t>(a.v[i] >= b.v[i]) << i;
  return lanes;
}

// a in the given lanes, 0 elsewhere.
inline Vec keep_bits(Vec a, uint32_t lanes) {
  for (int i = 0; i < Vec::kLanes; ++i)
    if (!(lanes >> i & 1)) a.v[i] = 0.0f;
  return a;
}

// a in the given lanes, b elsewhere.
inline Vec select_bits(Vec a, Vec b, uint32_t lanes) {
  for (int i = 0; i < Vec::kLanes; ++i)
    if (!(lanes >> i & 1)) a.v[i] = b.v[i];
  return a;
}

// Stores the given lanes of a consecutively to out, possibly followed by garbage, kLanes in all.
inline void store_bits(Vec a, uint32_t lanes, float* out) {
  for (int i = 0; i < Vec::kLanes; ++i)
    if (lanes >> i & 1) *out++ = a.v[i];
}

}  // namespace
}  // namespace tilewright
