// The products of a chunk on vectors of fp32, for inputs of any type. Include after a Vec.
#pragma once

#include "base/dot.h"
#include "kernels/gated_delta/right.h"

namespace tilewright {
namespace {

struct VectorMatrix {
  using Element = float;
  static constexpr int kParts = 1, kInputParts = 1;  // number of summands that represent a value

  static void store_left(float* row, int64_t, Vec v) { v.store(row); }
  static void store_right(float* pair_row, int64_t, int column, Vec even, Vec odd) {
    even.store(pair_row + column);
    odd.store(pair_row + kTileColumns + column);
  }

  // Copies a row, padded with zeros, and returns the sum of its squares.
  template <class T>
  static float copy_row(const T* row, int64_t width, int64_t padded, float* copy, int64_t) {
    for (int64_t i = width; i < padded; ++i) copy[i] = 0.0f;
    return accumulate(width, [&](Vec sum, int64_t i, auto count) {
      const Vec v = load_some(row + i, count);
      store_some(v, copy + i, count);
      return fma(v, v, sum);
    });
  }

  // Writes rows [tokens, depth] as right-hand tiles of their transpose, and the transpose [depth, kChunkTokens] itself.
  static void transpose(const float* rows, int64_t tokens, int64_t depth, float* tiles, float* columns) {
    for (int64_t token = 0; token < tokens; token += kTileColumns) {
      for (int64_t d = 0; d < depth; ++d, tiles += kTileColumns) {
        for (int i = 0; i < kTileColumns; ++i) tiles[i] = rows[(token + i) * depth + d];
        __builtin_memcpy(columns + d * kChunkTokens + token, tiles, kTileColumns * sizeof(float));
      }
    }
  }

  // c [32, 32] = A B.
  static constexpr int kRows = DotTraits::kRowsOf32, kTiles = DotTraits::tiles(kRows);
  static constexpr ProductName kProduct = {"fp32_fp32_fp32", kRows, kTiles * kTileColumns, 1};
  template <int, int>
  [[gnu::noinline]] void multiply(const float* a, int64_t stride, int64_t, const Right<float>& b, int64_t depth_tiles,
                                  float* c, Fetches& fetches) {
    for (int row = 0; row < 32; row += kRows, a += kRows * stride, c += kRows * kStripColumns)
      for (int tile = 0; tile < 2; tile += kTiles) {
        fetches.some(2 * kRows);
        dot_block<float, kRows, kTiles>(
            LeftRows<float>{a}, 0, stride, [&](int d, int j) { return b.tile(d, j); }, tile,
            static_cast<int>(depth_tiles), false, c + tile * kTileColumns, kStripColumns);
      }
  }
};

}  // namespace
}  // namespace tilewright
