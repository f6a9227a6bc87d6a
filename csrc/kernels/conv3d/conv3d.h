// Convolution over time, rows and columns, channels last: y = epilogue(sum over taps of x[pixel + tap] W[tap]^T + b).
//
//   x [B, T, H, W, C] bf16 or fp32, weight packed (base/tile.h) from [O, kt, kh, kw, C], y [B, T', H', W', O]
//   epilogue: + bias, then an activation, then + residual, as of linear
//   with a table [B, 3, C] of means, factors and biases, x is read as act((x - mean) * factor + bias): a norm whose
//   statistics are known costs no pass of its own, since x is copied for the product anyway
//
// Causal in time: frame 0 is preceded by `front` frames, of which the last are `previous` and those before them zeros;
// none follows the last one. Rows and columns are zero-padded after the norm, as much on each side as the output needs.
// Two dimensions are one frame. `doubled`: x is read with each pixel repeated 2 x 2 (nearest upsampling).
//
// It is linear's product, with output pixels as rows and taps times channels as depth: fp32 accumulation in one chain
// in order of depth, one rounding at the store. A pixel's bits depend neither on other pictures nor on threads. Frames
// of zeros before the first are not multiplied: a still picture costs a third of a kernel of three frames.
#pragma once

#include <cstdint>

#include "kernels/linear/linear.h"

namespace tilewright {

// [B, T, H, W, C]: strides in elements, the last one is 1.
struct Frames {
  void* data = nullptr;
  int64_t item_stride = 0, frame_stride = 0, row_stride = 0, pixel_stride = 0;
  int64_t num_frames = 0;
};

struct Size3d {
  int64_t frames, rows, columns;

  TILEWRIGHT_INLINE int64_t count() const { return frames * rows * columns; }
};

struct Conv3dArgs {
  Frames x, previous;  // of one type, product.x.dtype
  Frames y, residual;  // of one type, product.y.dtype; pixels and rows may lie apart, as every other one of a picture's
  const float* norm = nullptr;  // [B, 3, C], or none
  Activation norm_activation = Activation::none;
  int64_t batch = 0, channels = 0;
  int64_t height = 0, width = 0;  // of x as it lies in memory
  bool doubled = false;
  Size3d kernel = {}, stride = {}, out = {};
  int64_t front = 0, top = 0, left = 0;  // what lies before frame, row and column 0
  LinearArgs product;                    // weight and epilogue

  // With fewer channels than a tile is deep, all taps of a pixel share tiles of depth. Otherwise each tap has its own
  // tiles, the last one padded with zeros, so that a tile of x depends only on its tap.
  TILEWRIGHT_INLINE bool folded() const { return channels < kTileDepth || kernel.count() == 1; }
};

// Depth of a weight with these channels and taps: [O, depth] is packed.
TILEWRIGHT_INLINE int64_t conv3d_depth(int64_t channels, const Size3d& kernel) {
  const bool folded = channels < kTileDepth || kernel.count() == 1;
  return kernel.count() * (folded ? channels : round_up(channels, kTileDepth));
}

void conv3d(const Conv3dArgs& args);

// Output pixels that are computed together: a rectangle of one frame.
struct ConvTile {
  int64_t item, frame, row, column, rows, columns;
};

// x around such a rectangle as the products read it, in memory of the thread that multiplies it: [frame tap][row
// phase][column phase][rows][columns][pitch], zeros as padding. With a stride s, phase p has every s-th row or column
// from p on, so that the inputs of adjacent output pixels are adjacent, for each tap: output pixel (row, column) is
// entry row * columns + column, and its input for tap (dy, dx) is (dy / s) * columns + dx / s entries further, in the
// tap's phase. At the end of each row some entries are computed but not used: kw - 1 of them with stride 1.
struct TileShape {
  int64_t row_phases, column_phases, rows, columns, pitch;

  TILEWRIGHT_INLINE TileShape(const Conv3dArgs& args, const ConvTile& tile, int64_t element_bytes) {
    const bool folded = args.folded();
    row_phases = folded ? 1 : args.stride.rows < args.kernel.rows ? args.stride.rows : args.kernel.rows;
    column_phases = folded ? 1 : args.stride.columns < args.kernel.columns ? args.stride.columns : args.kernel.columns;
    rows = tile.rows + (folded ? 0 : (args.kernel.rows - 1) / args.stride.rows);
    columns = tile.columns + (folded ? 0 : (args.kernel.columns - 1) / args.stride.columns);
    // One cache line more than the channels: pixels a power of two apart would share few sets of L1.
    pitch = round_up(folded ? args.kernel.count() * args.channels : args.channels, kTileDepth) + 64 / element_bytes;
  }
  TILEWRIGHT_INLINE int64_t elements(const Conv3dArgs& args) const {
    return (args.folded() ? 1 : args.kernel.frames) * row_phases * column_phases * rows * columns * pitch;
  }
};

struct Conv3dKernels {
  const char* product;  // of bf16 weights, for the kernel's name (base/product_name.h)
  // Bytes of an element of x as the products read it.
  int64_t (*element_bytes)(const LinearArgs& args);
  // Computes all outputs of a tile and a range of strips.
  void (*run)(const Conv3dArgs& args, const ConvTile& tile, int64_t strip_begin, int64_t strip_end);
};

}  // namespace tilewright
