// Tile products on vectors, for attention. Include after a Vec.
#pragma once

#include "base/dot.h"

namespace tilewright {
namespace {

template <class T>
struct Products {
#ifdef __AVX512BF16__
  using Left = T;
#else
  using Left = float;
#endif
  explicit Products(int) {}

  template <class TileAt>
  void multiply(const Left* a, int64_t lda, int rows, TileAt tile_at, int column_tiles, int depth_tiles, float* c,
                int64_t ldc) {
    multiply_tiles<T>(a, lda, rows, tile_at, column_tiles, depth_tiles, c, ldc);
  }
};

}  // namespace
}  // namespace tilewright
