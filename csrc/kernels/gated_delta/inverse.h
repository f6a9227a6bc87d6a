// The inverse of a unit lower triangular matrix in fp32. Include after a Vec.
#pragma once

#include <cstdint>

namespace tilewright {
namespace {

inline constexpr int kInverseBlock = 16;

// Rows [first, first + 16) and one Vec of columns of X = (I + L)^-1, from the rows of X above: the block's rows of
// I - L X are summed up, then solved within the block. Sixteen rows are sixteen independent sums.
inline void invert_block(const float* lower, float* inverse, int64_t stride, int first, int column) {
  Vec rows[kInverseBlock];
  for (int r = 0; r < kInverseBlock; ++r) {
    alignas(64) float unit[Vec::kLanes] = {};
    if (first + r >= column && first + r < column + Vec::kLanes) unit[first + r - column] = 1.0f;
    rows[r] = Vec::load(unit);
  }
  // Above the column's own block the inverse is zero.
  for (int j = column / kInverseBlock * kInverseBlock; j < first; ++j) {
    const Vec above = Vec::load(inverse + j * stride + column);
#pragma GCC unroll 16
    for (int r = 0; r < kInverseBlock; ++r) rows[r] = fma(Vec::set1(-lower[(first + r) * stride + j]), above, rows[r]);
  }
#pragma GCC unroll 16
  for (int j = 0; j < kInverseBlock; ++j) {
    rows[j].store(inverse + (first + j) * stride + column);
#pragma GCC unroll 16
    for (int r = j + 1; r < kInverseBlock; ++r)
      rows[r] = fma(Vec::set1(-lower[(first + r) * stride + first + j]), rows[j], rows[r]);
  }
}

// inverse = (I + L)^-1 of `lower`, size a multiple of 16, read below the diagonal only. What lies above the diagonal
// blocks of 16 is not written.
inline void invert_unit_lower(const float* lower, float* inverse, int64_t stride, int size) {
  for (int first = 0; first < size; first += kInverseBlock)
    for (int column = 0; column < first + kInverseBlock; column += Vec::kLanes)
      invert_block(lower, inverse, stride, first, column);
}

}  // namespace
}  // namespace tilewright
