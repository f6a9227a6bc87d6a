// Shared by the levels of linear and the ops built on its products: the type of x, and the epilogue of a block of
// accumulators. Include after a Vec.
#pragma once

#include "base/vec/activation.h"
#include "kernels/linear/linear.h"

namespace tilewright {
namespace {

// Whether x stays bf16 for the bf16 dot product, or becomes fp32.
inline bool bf16_products(const LinearArgs& args) {
  const WeightFormat format = args.weight.format;
  return Vec::kHasBf16Dot && args.x.dtype == DType::bf16 && (format == WeightFormat::bf16 || is_widened(format));
}

template <class T>
inline void finish_row(const LinearArgs& args, const float* c, int64_t row, int64_t strip) {
  const bool gated = args.weight.gated;
  const int64_t width = gated ? kTileColumns : kStripColumns;
  const int64_t column = strip * width;
  const int64_t total = args.weight.out_features();
  const int64_t count = total - column < width ? total - column : width;
  const float* bias = args.bias ? args.bias + strip * kStripColumns : nullptr;
  const float* scales = args.weight.column_scales(strip);
  T* y = args.y.row<T>(row) + column;
  const T* residual = args.residual ? args.residual.row<T>(row) + column : nullptr;
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    Vec v = Vec::load(c + i);
    if (scales) v = v * Vec::load(scales + i);
    if (bias) v = v + Vec::load(bias + i);
    v = apply_activation<kIsBf16<T>>(v, args.activation);
    if (gated) {
      Vec up = Vec::load(c + kTileColumns + i);
      if (scales) up = up * Vec::load(scales + kTileColumns + i);
      if (bias) up = up + Vec::load(bias + kTileColumns + i);
      v = v * up;
    }
    if (i + Vec::kLanes <= count) {
      if (residual) v = v + Vec::load(residual + i);
      v.store(y + i);
    } else {
      if (residual) v = v + Vec::load(residual + i, count - i);
      v.store(y + i, count - i);
    }
  }
}

// Writes c [rows, 32], the sums of one strip for rows row_begin and on, through the epilogue. Not inlined: each product
// would have a copy with all activations.
__attribute__((noinline)) inline void finish_block(const LinearArgs& args, const float* c, int64_t row_begin, int rows,
                                                   int64_t strip) {
  for (int r = 0; r < rows; ++r) {
    if (args.y.dtype == DType::bf16)
      finish_row<bf16>(args, c + r * kStripColumns, row_begin + r, strip);
    else
      finish_row<float>(args, c + r * kStripColumns, row_begin + r, strip);
  }
}

// Row i of the product's left side.
template <class T>
inline const T* row_of_x(const LinearArgs& args, int64_t i) {
  return args.x.row<T>(args.x_rows ? args.x_rows[i] : i);
}

// Returns the row after the last one of the blocks before `block_end`.
inline int64_t end_row(const LinearArgs& args, int64_t block_end) {
  return block_end * kRowBlock < args.m ? block_end * kRowBlock : args.m;
}

inline int64_t rows_of_blocks(const LinearArgs& args, int64_t block_begin, int64_t block_end) {
  return end_row(args, block_end) - block_begin * kRowBlock;
}

inline int rows_in_block(const LinearArgs& args, int64_t block) {
  return static_cast<int>(rows_of_blocks(args, block, block + 1));
}

}  // namespace
}  // namespace tilewright
