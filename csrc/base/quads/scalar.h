// Products of quads of bytes (base/tile.h) for any machine. The other levels define the same names.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "base/vec/scalar.h"

#include "base/quads/widen.h"

namespace tilewright {
namespace {

// Sums of Vec::kLanes columns.
struct IntVec {
  int32_t v[Vec::kLanes];
  static IntVec set1(int32_t x) { return {{x, x, x, x}}; }
  // Prevents what follows from being computed before a loop in case the loop has no iterations: gcc 12 does so, and
  // then copies all sums in each iteration (int8 at 128 rows: 173 GOP/s instead of 295).
  void settle() {}
  static IntVec load(const int32_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
  void store(int32_t* p) const {
    for (int i = 0; i < Vec::kLanes; ++i) p[i] = v[i];
  }
  static IntVec load_bytes(const uint8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static IntVec load_bytes(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
  // this + a * b, modulo 2^32
  IntVec plus(IntVec a, IntVec b) const {
    IntVec sum;
    for (int i = 0; i < Vec::kLanes; ++i)
      sum.v[i] = static_cast<int32_t>(static_cast<uint32_t>(v[i]) +
                                      static_cast<uint32_t>(a.v[i]) * static_cast<uint32_t>(b.v[i]));
    return sum;
  }
  Vec to_float() const {
    return {{static_cast<float>(v[0]), static_cast<float>(v[1]), static_cast<float>(v[2]), static_cast<float>(v[3])}};
  }
};

// Four depths of a row of x, the same for all columns.
struct RowQuad {
  int8_t v[4];
  static RowQuad load(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
};

// Weights from 0 to 15, the lower or the upper halves of bytes.
struct NibbleQuads {
  int8_t v[4 * Vec::kLanes];
  template <bool kUpper>
  static NibbleQuads load(const uint8_t* p) {
    NibbleQuads quads;
    for (int i = 0; i < 4 * Vec::kLanes; ++i) quads.v[i] = static_cast<int8_t>(kUpper ? p[i] >> 4 : p[i] & 15);
    return quads;
  }
};

// Weights from -128 to 127. kOffset is added to each in products.
struct SignedQuads {
  static constexpr int kOffset = 0;
  int8_t v[4 * Vec::kLanes];
  static SignedQuads load(const uint8_t* p) {
    SignedQuads quads;
    for (int i = 0; i < 4 * Vec::kLanes; ++i) quads.v[i] = static_cast<int8_t>(p[i]);
    return quads;
  }
  static SignedQuads look_up(const int8_t* table, const NibbleQuads& codes) {
    SignedQuads quads;
    for (int i = 0; i < 4 * Vec::kLanes; ++i) quads.v[i] = table[codes.v[i]];
    return quads;
  }
};

// sum + the four products of each column.
template <class Quads>
inline IntVec dot(IntVec sum, const Quads& weights, const RowQuad& x) {
  for (int i = 0; i < Vec::kLanes; ++i)
    for (int d = 0; d < 4; ++d) sum.v[i] += weights.v[4 * i + d] * x.v[d];
  return sum;
}

inline Vec load_halves(const f16* p) { return {{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}}; }

// Stores integers from -127 to 127 as bytes; anything else as any byte.
inline void store_bytes(Vec a, int8_t* p) {
  for (int i = 0; i < Vec::kLanes; ++i)
    p[i] = a.v[i] >= -127.0f && a.v[i] <= 127.0f ? static_cast<int8_t>(a.v[i]) : int8_t{0};
}

// Use of the registers in products: rows whose sums they hold, and adjacent column tiles for that many rows.
struct QuadTraits {
  static constexpr int kRows = 2;
  static constexpr int tiles(int) { return 1; }
  static constexpr int kRowsToBytes = 14;
};

}  // namespace
}  // namespace tilewright

#include "base/quads/steps.h"
