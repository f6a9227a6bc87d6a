// The products of a chunk on vectors of fp32, whatever the inputs are stored in. Include after a Vec.
#pragma once

#include "base/dot.h"
#include "kernels/gated_delta/right.h"

namespace tilewright {
namespace {

struct VectorMatrix {
  using Element = float;
  static constexpr int kParts = 1;  // numbers that a value is kept as the sum of

  static void store_left(float* row, int64_t, Vec v) { v.store(row); }
  static void store_right(float* pair_row, int64_t, int column, Vec even, Vec odd) {
    even.store(pair_row + column);
    odd.store(pair_row + kTileColumns + column);
  }

  // Copies a row, padded with zeros, and gives the sum of its squares.
  template <class T>
  static float copy_row(const T* row, int64_t width, int64_t padded, float* copy) {
    for (int64_t i = width; i < padded; ++i) copy[i] = 0.0f;
    return accumulate(width, [&](Vec sum, int64_t i, auto count) {
      const Vec v = load_some(row + i, count);
      store_some(v, copy + i, count);
      return fma(v, v, sum);
    });
  }

  // rows [tokens, depth] as right-hand tiles of their transpose, and the transpose [depth, kChunkTokens] itself.
  static void transpose(const float* rows, int64_t tokens, int64_t depth, float* tiles, float* columns) {
    for (int64_t token = 0; token < tokens; token += kTileColumns) {
      for (int64_t d = 0; d < depth; ++d, tiles += kTileColumns) {
        for (int i = 0; i < kTileColumns; ++i) tiles[i] = rows[(token + i) * depth + d];
        __builtin_memcpy(columns + d * kChunkTokens + token, tiles, kTileColumns * sizeof(float));
      }
    }
  }

  // c [rows, 32] = A B, or +=. Products and other vector work share the units: pieces are left to their rest().
  template <bool kAccumulate, class Beside>
  void multiply(const float* a, int64_t stride, int64_t, int, int64_t rows, const Right<float>& b, int64_t depth_tiles,
                float* c, Beside&) {
    multiply_tiles<float, kAccumulate>(
        a, stride, static_cast<int>(rows), [&](int d, int j) { return b.tile(d, j); }, 2, static_cast<int>(depth_tiles),
        c, kStripColumns);
  }
};

}  // namespace
}  // namespace tilewright
