// Eight fp16 in a register, the operand of half_product.h.
#pragma once

#include <arm_neon.h>

#include "base/half.h"
#include "base/tile.h"

namespace tilewright {
namespace {

struct HalfVec {
  static constexpr int kLanes = 8;
  float16x8_t v;

  static HalfVec zero() { return {vdupq_n_f16(0)}; }
  static HalfVec load(const f16* p) { return {vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)))}; }
};

inline HalfVec operator+(HalfVec a, HalfVec b) { return {vaddq_f16(a.v, b.v)}; }

// Prefetch distance of weights in bytes, for many rows too, whose next ones come from the L2 cache. With few rows,
// which use weights as fast as memory delivers them, an earlier prefetch delays what is needed next: one row reads 34
// GB/s on a Neoverse N1, and 29 with 2,048 bytes.
inline constexpr int halves_ahead(int rows) { return rows <= 2 ? 768 : 2048; }

// Sums of kRows rows and 8 kVecs columns.
template <int kRows, int kVecs>
using HalfSums = HalfVec[kRows][kVecs];

template <int kRows, int kVecs, class Fn>
TILEWRIGHT_INLINE void for_each_sum(Fn fn) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) fn(r, v);
}

}  // namespace
}  // namespace tilewright
