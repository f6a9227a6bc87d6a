// Tile products on vectors, for attention. Include after a Vec.
#pragma once

#include "base/dot.h"
#include "kernels/attention/block_tiles.h"

namespace tilewright {
namespace {

template <class T>
struct Products {
  using Left = std::conditional_t<Vec::kHasBf16Dot, T, float>;
  explicit Products(int) {}

  void multiply(const Left* a, int64_t lda, int rows, PagedTiles<T> tile_at, int column_tiles, int depth_tiles,
                float* c, int64_t ldc) {
    if constexpr (!std::is_same_v<Left, T>)
      if (rows >= kRowsToWiden && depth_tiles <= kMostDepthTiles)
        return multiply_widened(a, lda, rows, tile_at, column_tiles, depth_tiles, c, ldc);
    multiply_tiles<T>(a, lda, rows, tile_at, column_tiles, depth_tiles, c, ldc);
  }

 private:
  static constexpr int kMostDepthTiles = 16;  // a block of keys, in fp32 half of the L1 cache

  // Converts a column of tiles to fp32 once, for all rows.
  void multiply_widened(const Left* a, int64_t lda, int rows, PagedTiles<T> tile_at, int column_tiles, int depth_tiles,
                        float* c, int64_t ldc) {
    alignas(64) float wide[kMostDepthTiles * kTileElements];
    for (int j = 0; j < column_tiles; ++j, c += kTileColumns) {
      for (int d = 0; d < depth_tiles; ++d) widen_tile(tile_at(d, j), wide + d * kTileElements);
      multiply_tiles<float>(a, lda, rows, ColumnTiles<float>{wide}, 1, depth_tiles, c, ldc);
    }
  }
};

}  // namespace
}  // namespace tilewright
