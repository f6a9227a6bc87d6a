// Vec before the headers written in terms of it.
#include "base/vec/avx512.h"

#include "base/dot.h"
#include "base/x86/amx.h"
#include "kernels/attention/block_tiles.h"

namespace tilewright {
namespace {

// fp32 keys and values have no tile instruction: vectors.
template <class T>
struct Products {
  using Left = float;
  explicit Products(int) {}

  void multiply(const float* a, int64_t lda, int rows, PagedTiles<T> tile_at, int column_tiles, int depth_tiles,
                float* c, int64_t ldc) {
    multiply_tiles<T>(a, lda, rows, tile_at, column_tiles, depth_tiles, c, ldc);
  }
};

template <>
struct Products<bf16> {
  using Left = bf16;
  TileScope tiles;
  explicit Products(int rows) : tiles(rows) {}

  void multiply(const bf16* a, int64_t lda, int rows, PagedTiles<bf16> tile_at, int column_tiles, int depth_tiles,
                float* c, int64_t ldc) {
    const LeftTiles left = LeftTiles::row_major(a, lda);
    for (int j = 0; j < column_tiles; j += 2) {
      auto tile = [&](int d, int k) { return tile_at(d, j + k); };
      // Two steps ahead, or the same depth of the next columns.
      auto fetch = [&](int d, int k) {
        if (d + 2 < depth_tiles)
          prefetch_tile(tile_at(d + 2, j + k));
        else if (j + 2 + k < column_tiles)
          prefetch_tile(tile_at(d + 2 - depth_tiles, j + 2 + k));
      };
      if (j + 2 <= column_tiles)
        multiply_columns<2>(left, rows, depth_tiles, tile, fetch, c + j * kTileColumns, ldc);
      else
        multiply_columns<1>(left, rows, depth_tiles, tile, fetch, c + j * kTileColumns, ldc);
    }
  }
};

}  // namespace
}  // namespace tilewright

#include "kernels/attention/weigher_avx512.h"

#include "kernels/attention/generic.h"
#include "kernels/level.h"

namespace tilewright {
TILEWRIGHT_KERNELS(attention, AttentionKernels) = {kTileProduct.text, run_items, merge_item, pack_keys, pack_values};
}  // namespace tilewright
