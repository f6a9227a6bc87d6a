// Rows of fp16 times columns of fp16, eight products per instruction, for cores without faster bf16 products. Columns
// lie in lines: those of one depth are adjacent. Include after Vec of NEON.
//
// fp16 has 11 bits, so long sums in it would lose the precision of the inputs. Here 16 products are summed in fp16,
// then four such sums, and these sums of 64 depths in fp32: for products of random numbers the error is 2^-10.5 of the
// result, less than half of what its rounding to bf16 adds. Longer sums in fp16 are faster, since its conversion to
// fp32 has one slow pipe: with 128 depths 1.06 times, with an error of 2^-10.3. Depths are summed in the same groups
// for any number of rows.
#pragma once

#include <utility>

#include "base/arm/half_eight_rows.h"
#include "base/arm/half_vec.h"
#include "base/dot.h"

namespace tilewright {
namespace {

// a * (lane kLane of b) + c. In assembly for the reason that fma_lane of fp32 has, and in the written order: gcc 12
// would place dependent products next to each other. A register whose 16-bit lane is used is one of the first 16.
template <int kLane>
inline HalfVec fma_lane(HalfVec a, HalfVec b, HalfVec c) {
  __asm__ volatile("fmla %0.8h, %1.8h, %2.h[%3]" : "+w"(c.v) : "w"(a.v), "x"(b.v), "i"(kLane));
  return c;
}

// sums += eight depths of kRows rows of x times as many lines.
template <int kRows, int kVecs, int kLine>
TILEWRIGHT_INLINE void multiply_eight(const f16* x, int64_t stride, const f16* lines, HalfSums<kRows, kVecs>& sums) {
  HalfVec rows[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) rows[r] = HalfVec::load(x + r * stride);
  const auto multiply = [&](auto depth) __attribute__((always_inline)) {
    constexpr int kDepth = decltype(depth)::value;
    const f16* line = lines + kDepth * kLine;
    if (kDepth * kLine % 32 == 0)  // 64 bytes
      __builtin_prefetch(reinterpret_cast<const char*>(line) + halves_ahead(kRows));
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const HalfVec columns = HalfVec::load(line + v * HalfVec::kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r][v] = fma_lane<kDepth>(columns, rows[r], sums[r][v]);
    }
  };
  [&]<int... kDepth>(std::integer_sequence<int, kDepth...>) __attribute__((always_inline)) {
    (multiply(std::integral_constant<int, kDepth>{}), ...);
  }(std::make_integer_sequence<int, 8>{});
}

// c [kRows, 8 kVecs], `ldc` apart, = or += rows of x, `stride` apart, times `count` depths, a multiple of 32, the first
// of which is a multiple of 64. Lines are kLine elements apart; line_at(depth) is the start of those of 32 depths. 16
// sums at a time leave half of the registers for the operands.
template <int kRows, int kVecs, int kLine, class LineAt>
__attribute__((noinline)) void multiply_halves(const f16* x, int64_t stride, LineAt line_at, int64_t count,
                                               bool accumulate, float* c, int64_t ldc) {
  constexpr int kChain = 16, kBlock = 64;
  constexpr int kChains = kRows * kVecs <= 4 ? 2 : 1;  // at once: the pipes take eight sums
  for (int64_t begin = 0; begin < count; begin += kBlock, accumulate = true) {
    const int64_t end = count - begin < kBlock ? count : begin + kBlock;
    HalfSums<kRows, kVecs> block;
    if constexpr (kRows == 8) {
      const f16* more = end - begin > kTileDepth ? line_at(begin + kTileDepth) : nullptr;
      multiply_eight_rows<kLine * sizeof(f16)>(x + begin, stride, line_at(begin), more, block);
    } else {
      for_each_sum<kRows, kVecs>([&](int r, int v) { block[r][v] = HalfVec::zero(); });
      for (int64_t depth = begin; depth < end; depth += kChains * kChain) {
        const f16* lines = line_at(depth / kTileDepth * kTileDepth) + depth % kTileDepth * kLine;
        HalfSums<kRows, kVecs> sums[kChains] = {};
        // The loop's end is hidden from gcc 12: it would mix the instructions of both iterations, and move half of the
        // operands between registers.
        int64_t chain_end = kChain;
        __asm__("" : "+r"(chain_end));
        for (int64_t d = 0; d < chain_end; d += 8)
#pragma GCC unroll 2
          for (int i = 0; i < kChains; ++i)
            multiply_eight<kRows, kVecs, kLine>(x + depth + i * kChain + d, stride, lines + (i * kChain + d) * kLine,
                                                sums[i]);
#pragma GCC unroll 2
        for (int i = 0; i < kChains; ++i)
          for_each_sum<kRows, kVecs>([&](int r, int v) { block[r][v] = block[r][v] + sums[i][r][v]; });
      }
    }
    for_each_sum<kRows, kVecs>([&](int r, int v) {
      // Added to 0 too: a sum of zeros is then 0 and never -0, whatever their order.
      const auto add = [&](float32x4_t sums, float* out) __attribute__((always_inline)) {
        ((accumulate ? Vec::load(out) : Vec::zero()) + Vec{sums}).store(out);
      };
      float* out = c + r * ldc + v * HalfVec::kLanes;
      add(vcvt_f32_f16(vget_low_f16(block[r][v].v)), out);
      add(vcvt_high_f32_f16(block[r][v].v), out + Vec::kLanes);
    });
  }
}

inline constexpr ProductName kHalfProduct = {"fp16_fp16_fp32", 8, kTileColumns, 1};

// fn(row, rows) for blocks of eight rows, which are the fastest, and for the remaining ones, with rows as a
// compile-time constant.
template <class Fn>
inline void for_row_blocks(int rows, Fn fn) {
  int row = 0;
  for (; row + 8 <= rows; row += 8) fn(row, std::integral_constant<int, 8>{});
  if (row < rows) with_rows<7>(rows - row, [&](auto num_rows) { fn(row, num_rows); });
}

}  // namespace
}  // namespace tilewright
