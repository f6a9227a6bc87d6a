// Rows of fp16 times strips of fp16, eight products to an instruction, for cores that have no faster ones of bf16.
// Include after Vec of NEON.
//
// fp16 has 11 bits, so that long sums would lose what the inputs are good for. Here 16 products are added up in it,
// four such sums again, and these sums of 64 depths in fp32: of products of random numbers the result has an error of
// 2^-10.5 of its size, less than half of what its rounding to bf16 adds. Longer sums in fp16 are faster, since its
// conversion to fp32 has one slow pipe: with 128 depths 1.06 times, with an error of 2^-10.3. Depths are added up at
// the same places whatever the number of rows.
#pragma once

#include <utility>

#include "base/half.h"
#include "base/tile.h"

namespace tilewright {
namespace {

struct HalfVec {
  static constexpr int kLanes = 8;
  float16x8_t v;

  static HalfVec load(const f16* p) { return {vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)))}; }
};

inline HalfVec operator+(HalfVec a, HalfVec b) { return {vaddq_f16(a.v, b.v)}; }

// a * (lane kLane of b) + c. As assembly for the reason that fma_lane of fp32 has, and in the order in which it is
// written: gcc 12 would put products next to each other that wait for each other. A register of which a lane of 16 bits
// is taken is one of the first 16.
template <int kLane>
inline HalfVec fma_lane(HalfVec a, HalfVec b, HalfVec c) {
  __asm__ volatile("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(c.v) : "w"(a.v), "x"(b.v), "i"(kLane));
  return c;
}

// Weights are asked for so many bytes ahead: of many rows too, whose next ones come from the L2 cache. Where few rows
// use them up as fast as memory gives them, what is asked for earlier is in the way of what is needed next: one row
// reads 34 GB/s on a Neoverse N1, and 29 with 2,048 bytes.
inline constexpr int halves_ahead(int rows) { return rows <= 2 ? 768 : 2048; }

// Rows of x at a time: 4 by the columns of a strip are 16 sums, which leaves half of the registers for the operands.
inline constexpr int kHalfRows = 4;
inline constexpr int kHalfVecs = kStripColumns / HalfVec::kLanes;

template <int kRows>
using HalfSums = HalfVec[kRows][kHalfVecs];

template <int kRows, class Fn>
TILEWRIGHT_INLINE void for_each_sum(Fn fn) {
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kHalfVecs; ++v) fn(r, v);
}

// sums += eight depths of kRows rows of x times those of a strip.
template <int kRows>
TILEWRIGHT_INLINE void multiply_eight(const f16* x, int64_t stride, const f16* strip, HalfSums<kRows>& sums) {
  HalfVec rows[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) rows[r] = HalfVec::load(x + r * stride);
  const auto multiply = [&](auto depth) __attribute__((always_inline)) {
    constexpr int kDepth = decltype(depth)::value;
    const f16* columns = strip + kDepth * kStripColumns;  // a line
    __builtin_prefetch(reinterpret_cast<const char*>(columns) + halves_ahead(kRows));
#pragma GCC unroll 4
    for (int v = 0; v < kHalfVecs; ++v) {
      const HalfVec column = HalfVec::load(columns + v * HalfVec::kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[r][v] = fma_lane<kDepth>(column, rows[r], sums[r][v]);
    }
  };
  [&]<int... kDepth>(std::integer_sequence<int, kDepth...>) __attribute__((always_inline)) {
    (multiply(std::integral_constant<int, kDepth>{}), ...);
  }(std::make_integer_sequence<int, 8>{});
}

// c [kRows, 32] = or += rows of x, `stride` apart, times `count` depths of a strip, the first of which is a multiple of
// 64.
template <int kRows>
__attribute__((noinline)) void multiply_halves(const f16* x, int64_t stride, const f16* strip, int64_t count,
                                               bool accumulate, float* c) {
  constexpr int kChain = 16, kBlock = 64;
  constexpr int kChains = kRows == 1 ? 2 : 1;  // at once: of one row a chain has four sums, half of what the pipes take
  for (int64_t begin = 0; begin < count; begin += kBlock, accumulate = true) {
    const int64_t end = count - begin < kBlock ? count : begin + kBlock;
    HalfSums<kRows> block = {};
    for (int64_t depth = begin; depth < end; depth += kChains * kChain) {
      HalfSums<kRows> sums[kChains] = {};
      // A loop whose end gcc 12 is not told: it would mix the instructions of both turns, and move half of the operands
      // from register to register.
      int64_t chain_end = depth + kChain;
      __asm__("" : "+r"(chain_end));
      for (int64_t d = depth; d < chain_end; d += 8)
#pragma GCC unroll 2
        for (int i = 0; i < kChains; ++i) {
          const int64_t at = d + i * kChain;
          multiply_eight<kRows>(x + at, stride, strip + at * kStripColumns, sums[i]);
        }
#pragma GCC unroll 2
      for (int i = 0; i < kChains; ++i)
        for_each_sum<kRows>([&](int r, int v) {
          block[r][v] = i == 0 && depth == begin ? sums[i][r][v] : block[r][v] + sums[i][r][v];
        });
    }
    for_each_sum<kRows>([&](int r, int v) {
      float* out = c + r * kStripColumns + v * HalfVec::kLanes;
      Vec low = {vcvt_f32_f16(vget_low_f16(block[r][v].v))}, high = {vcvt_high_f32_f16(block[r][v].v)};
      if (accumulate) {
        low = low + Vec::load(out);
        high = high + Vec::load(out + Vec::kLanes);
      }
      low.store(out);
      high.store(out + Vec::kLanes);
    });
  }
}

}  // namespace
}  // namespace tilewright
