#include "kernels/conv3d/conv3d.h"

#include <algorithm>

#include "base/arch.h"
#include "base/parallel.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(conv3d, Conv3dKernels)

namespace {

// Share of the second-level cache: the rest holds the weights of a chunk of depth, and sums. With a quarter, 512
// channels ran at nine tenths of the speed, as too few rows shared the weights.
constexpr int64_t kTileBytes = kCoreCacheBytes * 3 / 8;

// Whether pixels are rows of a matrix, one stride apart.
bool are_rows(const Frames& frames, int64_t batch, const Size3d& size) {
  const auto follows = [](int64_t count, int64_t stride, int64_t inner) { return count == 1 || stride == inner; };
  const int64_t row = size.columns * frames.pixel_stride, frame = size.rows * row;
  return follows(size.rows, frames.row_stride, row) && follows(size.frames, frames.frame_stride, frame) &&
         follows(batch, frames.item_stride, size.frames * frame);
}

// A convolution of single pixels that are rows of matrices is a linear.
bool is_linear(const Conv3dArgs& args) {
  return args.kernel.count() == 1 && args.stride.count() == 1 && !args.doubled && !args.norm && !args.front &&
         !args.top && !args.left && args.out.rows == args.height && args.out.columns == args.width &&
         are_rows(args.x, args.batch, {args.x.num_frames, args.height, args.width}) &&
         are_rows(args.y, args.batch, args.out) && are_rows(args.residual, args.batch, args.out);
}

// Returns the part size for as few equal parts as possible, each at most `most`: 9 as 5 + 4, not 8 + 1.
int64_t even_part(int64_t whole, int64_t most) { return ceil_div(whole, ceil_div(whole, std::max<int64_t>(most, 1))); }

// Products that take as long as copying an element through a norm with silu: some 1 ns, in which vectors compute 60
// products of fp32, and tiles more. Between 50 and 500 the tile becomes narrower, but hardly better.
constexpr double kProductsOfCopy = 100;

// Cost of an output pixel in a tile, in products per channel of x: its own, those at the end of each row that are
// unused, and the copy of its part of the tile with the pixels around it.
double cost_of(const Conv3dArgs& args, const ConvTile& tile, const TileShape& shape) {
  const double products = static_cast<double>(args.kernel.count() * args.product.weight.n);
  const double computed = static_cast<double>(tile.rows * shape.columns);
  const double copied = static_cast<double>(args.folded() ? computed * static_cast<double>(args.kernel.count())
                                                          : shape.rows * shape.row_phases * shape.columns *
                                                                shape.column_phases * args.kernel.frames);
  return (computed * products + copied * kProductsOfCopy) / static_cast<double>(tile.rows * tile.columns);
}

// Returns the tile of at most kTileBytes with the lowest cost per pixel: neither whole rows, of which few fit so that
// most of the copy is their surroundings, nor so narrow that many products are unused.
ConvTile best_tile(const Conv3dArgs& args, int64_t element_bytes) {
  const auto fits = [&](const ConvTile& tile) {
    return TileShape(args, tile, element_bytes).elements(args) * element_bytes <= kTileBytes;
  };
  ConvTile best = {0, 0, 0, 0, 1, 1};
  double least = -1;
  for (int64_t parts = 1;; ++parts) {
    ConvTile tile = {0, 0, 0, 0, 1, ceil_div(args.out.columns, parts)};
    if (fits(tile)) {
      int64_t most = args.out.rows;
      while (tile.rows < most) {
        ConvTile taller = tile;
        taller.rows = (tile.rows + most + 1) / 2;
        fits(taller) ? tile.rows = taller.rows : most = taller.rows - 1;
      }
      tile.rows = even_part(args.out.rows, tile.rows);
      const double cost = cost_of(args, tile, TileShape(args, tile, element_bytes));
      if (least < 0 || cost < least) {
        least = cost;
        best = tile;
      }
      if (tile.rows == args.out.rows) break;
    }
    if (tile.columns == 1) break;
  }
  return best;
}

}  // namespace

void conv3d(const Conv3dArgs& args) {
  if (args.batch * args.out.count() == 0) return;
  if (is_linear(args)) {
    LinearArgs product = args.product;
    product.x = {args.x.data, args.x.pixel_stride, args.product.x.dtype};
    product.y = {args.y.data, args.y.pixel_stride, args.product.y.dtype};
    if (args.residual.data) product.residual = {args.residual.data, args.residual.pixel_stride, args.product.y.dtype};
    return linear(product);
  }
  const Conv3dKernels& kernels = select(kTable);
  const ConvTile whole = best_tile(args, kernels.element_bytes(args.product));
  const int64_t down = ceil_div(args.out.rows, whole.rows), across = ceil_div(args.out.columns, whole.columns);
  const int64_t num_tiles = args.batch * args.out.frames * down * across;
  // Each thread gets several tasks. Tasks with fewer strips copy x again, but a strip of 32 outputs outweighs that:
  // with 512 channels and 3 x 3 taps its products take 16 times as long as the copy.
  const int64_t num_strips = args.product.weight.num_strips();
  const int64_t parts = std::clamp<int64_t>(ceil_div(num_threads() * 4, num_tiles), 1, num_strips);
  const int64_t strips = ceil_div(num_strips, parts), turns = ceil_div(num_strips, strips);
  parallel_for(num_tiles * turns, [&](int64_t task) {
    int64_t index = task / turns;
    ConvTile tile = whole;
    tile.column = index % across * whole.columns;
    index /= across;
    tile.row = index % down * whole.rows;
    index /= down;
    tile.frame = index % args.out.frames;
    tile.item = index / args.out.frames;
    tile.rows = std::min(whole.rows, args.out.rows - tile.row);
    tile.columns = std::min(whole.columns, args.out.columns - tile.column);
    const int64_t strip = task % turns * strips;
    kernels.run(args, tile, strip, std::min(strip + strips, num_strips));
  });
}

}  // namespace tilewright
