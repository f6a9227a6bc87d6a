// Products of half_product.h for eight rows at a time, in assembly: gcc 12's loops do not load the next rows and
// columns during products, and move sums between registers. On a Neoverse N1 64 instead of 53 GFLOP/s, of 80, from the
// L1 cache. v0 to v7 hold eight depths of the rows; v24 and v25, v26 and v27 alternately the columns of a depth; 16
// other registers the sums. Sums of finished chains go to memory.
#pragma once

#include "base/arm/half_vec.h"

namespace tilewright {
namespace {

// clang-format off: a line here is one of the listing, or a few that belong together.
#define TW_ROW(ROW) "ldr q" #ROW ", [%[row]]\n\tadd %[row], %[row], %[stride]\n\t"
#define TW_ROWS TW_ROW(0) TW_ROW(1) TW_ROW(2) TW_ROW(3) TW_ROW(4) TW_ROW(5) TW_ROW(6) TW_ROW(7)
#define TW_COLUMNS(C0, C1) "ldp q" #C0 ", q" #C1 ", [%[lines]], %[line]\n\tprfm pldl1keep, [%[lines], %[ahead]]\n\t"
#define TW_MULTIPLY(OP, ROW, LANE, C0, C1, S0, S1)            \
  OP " %" #S0 ".8h, v" #C0 ".8h, v" #ROW ".h[" #LANE "]\n\t"  \
  OP " %" #S1 ".8h, v" #C1 ".8h, v" #ROW ".h[" #LANE "]\n\t"

// Code before or after the two products of a row. Rows: a line of 64 bytes is 32 depths, so the next line is prefetched
// in time.
#define TW_NOTHING(ROW, S0, S1)
#define TW_NEXT_ROW(ROW, S0, S1) "prfm pldl1keep, [%[row], 112]\n\t" TW_ROW(ROW)
#define TW_SAVE(ROW, S0, S1) "stp %q" #S0 ", %q" #S1 ", [%[done], 32 * " #ROW "]\n\t"
#define TW_ADD(ROW, S0, S1)                        \
  "ldp q28, q29, [%[done], 32 * " #ROW "]\n\t"     \
  "fadd v28.8h, v28.8h, %" #S0 ".8h\n\t"           \
  "fadd v29.8h, v29.8h, %" #S1 ".8h\n\t"           \
  "stp q28, q29, [%[done], 32 * " #ROW "]\n\t"

#define TW_DEPTH(OP, LANE, C0, C1, BEFORE, AFTER)                              \
  BEFORE(0, 0, 1) TW_MULTIPLY(OP, 0, LANE, C0, C1, 0, 1) AFTER(0, 0, 1)        \
  BEFORE(1, 2, 3) TW_MULTIPLY(OP, 1, LANE, C0, C1, 2, 3) AFTER(1, 2, 3)        \
  BEFORE(2, 4, 5) TW_MULTIPLY(OP, 2, LANE, C0, C1, 4, 5) AFTER(2, 4, 5)        \
  BEFORE(3, 6, 7) TW_MULTIPLY(OP, 3, LANE, C0, C1, 6, 7) AFTER(3, 6, 7)        \
  BEFORE(4, 8, 9) TW_MULTIPLY(OP, 4, LANE, C0, C1, 8, 9) AFTER(4, 8, 9)        \
  BEFORE(5, 10, 11) TW_MULTIPLY(OP, 5, LANE, C0, C1, 10, 11) AFTER(5, 10, 11)  \
  BEFORE(6, 12, 13) TW_MULTIPLY(OP, 6, LANE, C0, C1, 12, 13) AFTER(6, 12, 13)  \
  BEFORE(7, 14, 15) TW_MULTIPLY(OP, 7, LANE, C0, C1, 14, 15) AFTER(7, 14, 15)
#define TW_MORE(LANE, C0, C1, N0, N1) TW_COLUMNS(N0, N1) TW_DEPTH("fmla", LANE, C0, C1, TW_NOTHING, TW_NOTHING)

// The first seven of eight depths, whose columns are loaded; then the eighth separately, with loads of the rows' next
// eight depths from byte `NEXT` on, and of their first columns.
#define TW_SEVEN(OP, BEFORE)                                                        \
  TW_COLUMNS(26, 27) TW_DEPTH(OP, 0, 24, 25, BEFORE, TW_NOTHING)                    \
  TW_MORE(1, 26, 27, 24, 25) TW_MORE(2, 24, 25, 26, 27) TW_MORE(3, 26, 27, 24, 25)  \
  TW_MORE(4, 24, 25, 26, 27) TW_MORE(5, 26, 27, 24, 25) TW_MORE(6, 24, 25, 26, 27)
#define TW_LAST TW_DEPTH("fmla", 7, 26, 27, TW_NOTHING, TW_NOTHING)
#define TW_LAST_AND_NEXT(NEXT)                                                      \
  "add %[row], %[x], " #NEXT "\n\t"                                                 \
  TW_COLUMNS(24, 25) TW_DEPTH("fmla", 7, 26, 27, TW_NOTHING, TW_NEXT_ROW)

// All of 32 depths but the last.
#define TW_TWO_CHAINS                                                                                        \
  TW_ROWS TW_COLUMNS(24, 25)                                                                                 \
  TW_SEVEN("fmul", TW_NOTHING) TW_LAST_AND_NEXT(16) TW_SEVEN("fmla", TW_NOTHING) TW_LAST_AND_NEXT(32)        \
  TW_SEVEN("fmul", TW_SAVE) TW_LAST_AND_NEXT(48) TW_SEVEN("fmla", TW_NOTHING)

#define TW_SUMS(S)                                                                                            \
  "=&w"(S[0][0].v), "=&w"(S[0][1].v), "=&w"(S[1][0].v), "=&w"(S[1][1].v), "=&w"(S[2][0].v), "=&w"(S[2][1].v), \
  "=&w"(S[3][0].v), "=&w"(S[3][1].v), "=&w"(S[4][0].v), "=&w"(S[4][1].v), "=&w"(S[5][0].v), "=&w"(S[5][1].v), \
  "=&w"(S[6][0].v), "=&w"(S[6][1].v), "=&w"(S[7][0].v), "=&w"(S[7][1].v)
#define TW_CLOBBERED "memory", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v24", "v25", "v26", "v27", "v28", "v29"

// sums = 64 depths of eight rows of x, `stride` apart, times two vectors of columns. Lines, kLineBytes apart, lie in
// two places, 32 depths in each; if `more` is null, there are only the first 32. A chain begins with a product without
// an addend.
template <int kLineBytes>
TILEWRIGHT_INLINE void multiply_eight_rows(const f16* x, int64_t stride, const f16* lines, const f16* more,
                                           HalfSums<8, 2>& sums) {
  HalfSums<8, 2> done;
  const f16* row = x;
  const int64_t stride_bytes = stride * static_cast<int64_t>(sizeof(f16));
  if (more) {
    __asm__ volatile(
        TW_TWO_CHAINS
        "mov %[lines], %[more]\n\t" TW_LAST_AND_NEXT(64)
        TW_SEVEN("fmul", TW_ADD) TW_LAST_AND_NEXT(80) TW_SEVEN("fmla", TW_NOTHING) TW_LAST_AND_NEXT(96)
        TW_SEVEN("fmul", TW_ADD) TW_LAST_AND_NEXT(112) TW_SEVEN("fmla", TW_NOTHING) TW_LAST
        : TW_SUMS(sums), [row] "+&r"(row), [lines] "+&r"(lines)
        : [x] "r"(x), [stride] "r"(stride_bytes), [more] "r"(more), [done] "r"(&done), [line] "i"(kLineBytes),
          [ahead] "i"(halves_ahead(8))
        : TW_CLOBBERED);
  } else {
    __asm__ volatile(
        TW_TWO_CHAINS TW_LAST
        : TW_SUMS(sums), [row] "+&r"(row), [lines] "+&r"(lines)
        : [x] "r"(x), [stride] "r"(stride_bytes), [done] "r"(&done), [line] "i"(kLineBytes),
          [ahead] "i"(halves_ahead(8))
        : TW_CLOBBERED);
  }
  for_each_sum<8, 2>([&](int r, int v) { sums[r][v] = done[r][v] + sums[r][v]; });
}
// clang-format on

#undef TW_ROW
#undef TW_ROWS
#undef TW_COLUMNS
#undef TW_MULTIPLY
#undef TW_NOTHING
#undef TW_NEXT_ROW
#undef TW_SAVE
#undef TW_ADD
#undef TW_DEPTH
#undef TW_MORE
#undef TW_SEVEN
#undef TW_LAST
#undef TW_LAST_AND_NEXT
#undef TW_TWO_CHAINS
#undef TW_SUMS
#undef TW_CLOBBERED

}  // namespace
}  // namespace tilewright
