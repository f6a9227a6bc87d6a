// One row times two columns of bf16 tiles, in fp32, without bf16 product instructions. Include after Vec and DotTraits
// of NEON.
//
// Half of the instructions convert bf16 to fp32, and both halves run on the same two pipes, which must not wait if
// weights are to pass at the speed of memory. A Neoverse N1 executes two of them per cycle only if products, with a
// latency of four cycles, and conversions, with two, alternate: results that are ready at once share a port. So while a
// line of weights (a pair of depths by 16 columns) is multiplied, the next is converted and the one after it loaded;
// other orders were a fifth slower. In assembly, because a compiler reorders them.
#pragma once

#include "base/tile.h"

namespace tilewright {
namespace {

struct WeightLine {
  uint16x8_t pairs[4];

  static TILEWRIGHT_INLINE WeightLine load(const bf16* p) {
    WeightLine line;
    __asm__ volatile("ldp %q0, %q1, [%4]\n\tldp %q2, %q3, [%4, #32]"
                     : "=w"(line.pairs[0]), "=w"(line.pairs[1]), "=w"(line.pairs[2]), "=w"(line.pairs[3])
                     : "r"(p), "m"(*reinterpret_cast<const bf16(*)[32]>(p)));
    return line;
  }
};

// Even and odd depths of a line.
struct WideLine {
  Vec depths[2][4];
};

// sums += the wide columns times lane kLane of the row, alternating with the conversion of the same depth of `next`.
template <int kLane>
TILEWRIGHT_INLINE void multiply_and_widen(Vec (&sums)[4], Vec row, Vec (&wide)[4], const WeightLine& next,
                                          uint16x8_t zeros) {
#define TILEWRIGHT_IN_TURNS(TRANSPOSE)                                                                    \
  __asm__ volatile("fmla %0.4s, %4.4s, %8.s[%14]\n\t" TRANSPOSE                                           \
                   " %4.8h, %9.8h, %10.8h\n\t"                                                            \
                   "fmla %1.4s, %5.4s, %8.s[%14]\n\t" TRANSPOSE                                           \
                   " %5.8h, %9.8h, %11.8h\n\t"                                                            \
                   "fmla %2.4s, %6.4s, %8.s[%14]\n\t" TRANSPOSE                                           \
                   " %6.8h, %9.8h, %12.8h\n\t"                                                            \
                   "fmla %3.4s, %7.4s, %8.s[%14]\n\t" TRANSPOSE " %7.8h, %9.8h, %13.8h"                   \
                   : "+w"(sums[0].v), "+w"(sums[1].v), "+w"(sums[2].v), "+w"(sums[3].v), "+w"(wide[0].v), \
                     "+w"(wide[1].v), "+w"(wide[2].v), "+w"(wide[3].v)                                    \
                   : "w"(row.v), "w"(zeros), "w"(next.pairs[0]), "w"(next.pairs[1]), "w"(next.pairs[2]),  \
                     "w"(next.pairs[3]), "i"(kLane))
  if constexpr (kLane % 2 == 0)
    TILEWRIGHT_IN_TURNS("trn1");
  else
    TILEWRIGHT_IN_TURNS("trn2");
#undef TILEWRIGHT_IN_TURNS
}

// sums += lanes kLane and kLane + 1 of the row times the wide line, which becomes `next`, which becomes the line at
// `after`.
template <int kLane>
TILEWRIGHT_INLINE void multiply_line(Vec (&sums)[4], Vec row, WideLine& wide, WeightLine& next, const bf16* after,
                                     uint16x8_t zeros) {
  const WeightLine loaded = WeightLine::load(after);
  multiply_and_widen<kLane>(sums, row, wide.depths[0], next, zeros);
  multiply_and_widen<kLane + 1>(sums, row, wide.depths[1], next, zeros);
  next = loaded;
}

// sums [2 tiles][16 columns] += a row times one tile of depth of both columns, in the same chains of products as
// multiply_tile_by_lanes.
TILEWRIGHT_INLINE void multiply_row_by_tile(const float* row, const bf16* const (&tiles)[2], Vec (&sums)[2][4]) {
  constexpr int kLine = 32, kAhead = DotTraits::kPrefetchBytes / 2;
  const uint16x8_t zeros = vdupq_n_u16(0);
  const bf16 *first = tiles[0], *second = tiles[1];
  WideLine wide;
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) load_pair(first + 8 * v, wide.depths[0][v], wide.depths[1][v]);
  WeightLine next = WeightLine::load(second);
  for (int depth = 0; depth < kTileDepth; depth += 4) {
    const Vec four = Vec::load(row + depth);
    // Nothing follows the last lines: what is loaded instead is not used.
    const bool is_last = depth + 4 == kTileDepth;
    const bf16 *first_after = is_last ? first : first + 2 * kLine,
               *second_after = is_last ? second : second + 2 * kLine;
    __builtin_prefetch(first + kAhead);
    multiply_line<0>(sums[0], four, wide, next, first + kLine, zeros);
    __builtin_prefetch(second + kAhead);
    multiply_line<0>(sums[1], four, wide, next, second + kLine, zeros);
    __builtin_prefetch(first + kLine + kAhead);
    multiply_line<2>(sums[0], four, wide, next, first_after, zeros);
    __builtin_prefetch(second + kLine + kAhead);
    multiply_line<2>(sums[1], four, wide, next, second_after, zeros);
    first = first_after;
    second = second_after;
  }
}

}  // namespace
}  // namespace tilewright
