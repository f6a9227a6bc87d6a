// Convolution on AMX tiles: bf16 by bf16; all else on vectors.
#include "base/x86/amx.h"

#include "base/vec/avx512.h"
#include "kernels/conv3d/generic.h"
#include "kernels/level.h"

namespace tilewright {
namespace {

// Up to 32 entries of a copied tile, from `data` on.
struct GatheredTiles {
  const bf16* data;
  const int64_t* offsets;
  int num_offsets;
  int64_t row_stride, row_tile_stride;
  static constexpr bool prefetch = true;

  // Also called for depths past the end, to prefetch them: it then returns the last one.
  const bf16* at(int depth_tile) const {
    return data + offsets[depth_tile < num_offsets ? depth_tile : num_offsets - 1];
  }
};

class TileProducts {
 public:
  static constexpr int kChunk = kDepthChunk;

  explicit TileProducts(int rows) : tiles_(rows < kRowBlock ? rows : kRowBlock) {}

  void multiply(const Gathered<bf16>& left, int64_t pitch, int rows, const bf16* weights, int count, bool accumulate,
                float* c) {
    const StripTiles<bf16> tile_at = {weights};
    const auto fetch = [&](int d, int j) { prefetch_tile(tile_at(d + 2, j)); };
    for (int row = 0; row < rows; row += kRowBlock) {
      const int block = rows - row < kRowBlock ? rows - row : kRowBlock;
      tiles_.set_rows(block);
      const GatheredTiles side = {left.data + row * pitch, left.offsets, count, pitch, 16 * pitch};
      float* sums = c + row * kStripColumns;
      accumulate ? multiply_columns<2, true>(side, block, count, tile_at, fetch, sums, kStripColumns)
                 : multiply_columns<2, false>(side, block, count, tile_at, fetch, sums, kStripColumns);
    }
  }

 private:
  TileScope tiles_;
};

void run(const Conv3dArgs& args, const ConvTile& tile, int64_t strip_begin, int64_t strip_end) {
  if (!bf16_products(args.product)) return conv3d_run<false>(args, tile, strip_begin, strip_end);
  run_tile<bf16, bf16, bf16, TileProducts>(args, tile, strip_begin, strip_end);
}

}  // namespace

TILEWRIGHT_KERNELS(conv3d, Conv3dKernels) = {kTileProduct.text, conv3d_element_bytes, run};

}  // namespace tilewright
