// The inverse of a unit lower triangular matrix in fp32. Include after a Vec.
#pragma once

#include <cstdint>

namespace tilewright {
namespace {

inline constexpr int kInverseBlock = 16;

// Computes rows [first, first + 16) and one Vec of columns of X = (I + L)^-1 from the rows of X above: the block's rows
// of I - L X are summed, then solved within the block. Sixteen rows are sixteen independent sums.
template <class Put>
inline void invert_block(const float* negative, float* inverse, int64_t stride, int first, int column, Put put) {
  const float* factors = negative + first * stride;
  Vec rows[kInverseBlock];
#pragma GCC unroll 16
  for (int r = 0; r < kInverseBlock; ++r)
    rows[r] = keep_lanes(Vec::set1(1.0f), first + r - column, first + r - column + 1, Vec::zero());
  // Above the column's own block the inverse is zero.
  for (int j = column / kInverseBlock * kInverseBlock; j < first; ++j) {
    const Vec above = Vec::load(inverse + j * stride + column);
#pragma GCC unroll 16
    for (int r = 0; r < kInverseBlock; ++r) rows[r] = fma(Vec::set1(factors[r * stride + j]), above, rows[r]);
  }
#pragma GCC unroll 16
  for (int j = 0; j < kInverseBlock; ++j) {
    rows[j].store(inverse + (first + j) * stride + column);
    put(first + j, column, rows[j]);
#pragma GCC unroll 16
    for (int r = j + 1; r < kInverseBlock; ++r)
      rows[r] = fma(Vec::set1(factors[r * stride + first + j]), rows[j], rows[r]);
  }
}

// inverse = (I + L)^-1 of `negative` = -L, size a multiple of 16, read below the diagonal only; put(row, column, Vec)
// gets all of it too. Above the diagonal blocks of 16 nothing is written.
template <class Put>
inline void invert_unit_lower(const float* negative, float* inverse, int64_t stride, int size, Put put) {
  for (int first = 0; first < size; first += kInverseBlock)
    for (int column = 0; column < first + kInverseBlock; column += Vec::kLanes)
      invert_block(negative, inverse, stride, first, column, put);
}

}  // namespace
}  // namespace tilewright
