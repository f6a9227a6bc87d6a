// Computes a tile of a convolution: x around it is copied, then multiplied strip by strip. Include after a Vec.
#pragma once

#include "base/dot.h"
#include "base/scratch.h"
#include "base/vec/row.h"
#include "kernels/conv3d/conv3d.h"
#include "kernels/linear/epilogue.h"

namespace tilewright {
namespace {

int64_t conv3d_element_bytes(const LinearArgs& args) { return bf16_products(args) ? 2 : 4; }

template <class TX, class Left>
inline void copy_elements(const TX* x, int64_t count, Left* to) {
  for_each_vec(count, [&](int64_t i, auto left) { store_some(load_some(x + i, left), to + i, left); });
}

// Copies through a norm, whose table has three rows [C].
template <class TX, class Left>
inline void copy_normed(const TX* x, int64_t count, const float* table, Activation activation, Left* to) {
  const float *means = table, *factors = table + count, *biases = factors + count;
  for_each_vec(count, [&](int64_t i, auto left) {
    const Vec v = fma(load_some(x + i, left) - load_some(means + i, left), load_some(factors + i, left),
                      load_some(biases + i, left));
    store_some(apply_activation<kIsBf16<TX>>(v, activation), to + i, left);
  });
}

template <class Left>
inline void clear_elements(Left* to, int64_t count) {
  for_each_vec(count, [&](int64_t i, auto left) { store_some(Vec::zero(), to + i, left); });
}

// Frames, rows and pixels of x by the taps' coordinates: with padding, and doubled.
template <class TX>
struct Source {
  const Conv3dArgs& args;
  int64_t item;

  // Null for zeros.
  const TX* frame(int64_t index) const {
    const Frames& frames = index < 0 ? args.previous : args.x;
    if (index < 0) index += frames.num_frames;
    if (index < 0) return nullptr;
    return static_cast<const TX*>(frames.data) + item * frames.item_stride + index * frames.frame_stride;
  }
  const TX* row(const TX* frame, const Frames& frames, int64_t index) const {
    if (!frame || index < 0 || index >= args.height << args.doubled) return nullptr;
    return frame + (index >> args.doubled) * frames.row_stride;
  }
  // Returns a pixel of a row that has any.
  const TX* pixel(const TX* row, const Frames& frames, int64_t index) const {
    if (index < 0 || index >= args.width << args.doubled) return nullptr;
    return row + (index >> args.doubled) * frames.pixel_stride;
  }
  // Copies the channels of a pixel for the product.
  template <class Left>
  void copy(const TX* pixel, Left* to) const {
    if (args.norm)
      copy_normed(pixel, args.channels, args.norm + item * 3 * args.channels, args.norm_activation, to);
    else
      copy_elements(pixel, args.channels, to);
  }
};

// Copies a row of pixels, every `step`-th from `column` on, each with its channels and zeros up to whole tiles of
// depth.
template <class TX, class Left>
void copy_row(const Source<TX>& source, const TX* row, const Frames& frames, int64_t column, int64_t step,
              int64_t count, int64_t pitch, Left* to) {
  const int64_t channels = source.args.channels, width = round_up(channels, kTileDepth);
  for (int64_t i = 0; i < count; ++i, column += step, to += pitch) {
    const TX* pixel = row ? source.pixel(row, frames, column) : nullptr;
    if (!pixel) {
      clear_elements(to, width);
      continue;
    }
    source.copy(pixel, to);
    if (channels < width) clear_elements(to + channels, width - channels);
  }
}

// Returns a tile's first tap in time that sees a frame: those before it see zeros. At least one tap is left.
inline int64_t first_frame_tap(const Conv3dArgs& args, const ConvTile& tile) {
  const int64_t zeros = args.front - args.previous.num_frames - tile.frame * args.stride.frames;
  const int64_t last = args.kernel.frames - 1;
  return zeros < 0 ? 0 : zeros < last ? zeros : last;
}

// Copies a tile of the frames from `first` on.
template <class TX, class Left>
void copy_tile(const Conv3dArgs& args, const ConvTile& tile, const TileShape& shape, int64_t first, Left* to) {
  const Source<TX> source = {args, tile.item};
  to += first * shape.row_phases * shape.column_phases * shape.rows * shape.columns * shape.pitch;
  for (int64_t dt = first; dt < args.kernel.frames; ++dt) {
    const int64_t index = tile.frame * args.stride.frames + dt - args.front;
    const TX* frame = source.frame(index);
    const Frames& frames = index < 0 ? args.previous : args.x;
    for (int64_t py = 0; py < shape.row_phases; ++py)
      for (int64_t px = 0; px < shape.column_phases; ++px)
        for (int64_t r = 0; r < shape.rows; ++r, to += shape.columns * shape.pitch)
          copy_row(source, source.row(frame, frames, (tile.row + r) * args.stride.rows + py - args.top), frames,
                   tile.column * args.stride.columns + px - args.left, args.stride.columns, shape.columns, shape.pitch,
                   to);
  }
}

// For few channels: copies every output pixel with all its taps in a row.
template <class TX, class Left>
void copy_folded_tile(const Conv3dArgs& args, const ConvTile& tile, const TileShape& shape, Left* to) {
  const Source<TX> source = {args, tile.item};
  const int64_t channels = args.channels, depth = args.kernel.count() * channels, width = round_up(depth, kTileDepth);
  for (int64_t r = 0; r < tile.rows; ++r)
    for (int64_t c = 0; c < tile.columns; ++c, to += shape.pitch) {
      Left* taps = to;
      for (int64_t dt = 0; dt < args.kernel.frames; ++dt) {
        const int64_t index = tile.frame * args.stride.frames + dt - args.front;
        const TX* frame = source.frame(index);
        const Frames& frames = index < 0 ? args.previous : args.x;
        for (int64_t dy = 0; dy < args.kernel.rows; ++dy) {
          const TX* row = source.row(frame, frames, (tile.row + r) * args.stride.rows + dy - args.top);
          for (int64_t dx = 0; dx < args.kernel.columns; ++dx, taps += channels) {
            const int64_t column = (tile.column + c) * args.stride.columns + dx - args.left;
            const TX* pixel = row ? source.pixel(row, frames, column) : nullptr;
            pixel ? source.copy(pixel, taps) : clear_elements(taps, channels);
          }
        }
      }
      clear_elements(to + depth, width - depth);
    }
}

// Finds each tile of depth, relative to an output pixel's entry.
inline void find_depths(const Conv3dArgs& args, const TileShape& shape, int64_t* offsets) {
  const int64_t depth_tiles = args.product.weight.num_depth_tiles();
  if (args.folded()) {
    for (int64_t d = 0; d < depth_tiles; ++d) offsets[d] = d * kTileDepth;
    return;
  }
  const Size3d& kernel = args.kernel;
  for (int64_t dt = 0; dt < kernel.frames; ++dt)
    for (int64_t dy = 0; dy < kernel.rows; ++dy)
      for (int64_t dx = 0; dx < kernel.columns; ++dx) {
        const int64_t phase =
            (dt * shape.row_phases + dy % args.stride.rows) * shape.column_phases + dx % args.stride.columns;
        const int64_t entry = (phase * shape.rows + dy / args.stride.rows) * shape.columns + dx / args.stride.columns;
        for (int64_t channel = 0; channel < args.channels; channel += kTileDepth)
          *offsets++ = entry * shape.pitch + channel;
      }
}

// The left side of the product: entries `pitch` apart, with tiles of depth at the taps' offsets.
template <class Left>
struct Gathered {
  using Element = Left;
  const Left* data;
  const int64_t* offsets;

  const Left* at(int depth_tile) const { return data + offsets[depth_tile]; }
};

// Products on vectors, one chunk of depth at a time.
template <class TW, class Left>
struct VectorProducts {
  // Weights of a chunk stay in the caches for all entries of a tile. 16 tiles of depth by 2 of fp32 are 64 KB; fewer,
  // which L1 would hold, were no faster, since sums are then reloaded more often.
  static constexpr int kChunk = DotTraits::kDepthTiles > 0 ? DotTraits::kDepthTiles : 16;
  static constexpr bool kWidens = !std::is_same_v<TW, Left>;

  alignas(64) float wide[kWidens ? kChunk * 2 * kTileElements : 1];

  explicit VectorProducts(int) {}

  void multiply(const Gathered<Left>& left, int64_t pitch, int rows, const TW* weights, int count, bool accumulate,
                float* c) {
    if constexpr (kWidens) {
      if (rows >= kRowsToWiden) {
        for (int tile = 0; tile < 2 * count; ++tile)
          widen_tile(weights + tile * kTileElements, wide + tile * kTileElements);
        return multiply_by<float>(left, pitch, rows, wide, count, accumulate, c);
      }
    }
    multiply_by<TW>(left, pitch, rows, weights, count, accumulate, c);
  }

 private:
  template <class TB>
  static void multiply_by(const Gathered<Left>& left, int64_t pitch, int rows, const TB* weights, int count,
                          bool accumulate, float* c) {
    multiply_side<TB>(left, pitch, rows, StripTiles<TB>{weights}, 2, count, c, kStripColumns, accumulate);
  }
};

// Pixels of y or of the residual from the start of a tile's row on.
inline Rows pixels_of(const Frames& frames, DType dtype, const ConvTile& tile, int64_t row) {
  if (!frames.data) return {};
  const int64_t offset = tile.item * frames.item_stride + tile.frame * frames.frame_stride +
                         (tile.row + row) * frames.row_stride + tile.column * frames.pixel_stride;
  return {static_cast<char*>(frames.data) + offset * static_cast<int64_t>(size_of(dtype)), frames.pixel_stride, dtype};
}

// c is [entries, 32]; entries past the end of a row are unused.
inline void finish_tile(const Conv3dArgs& args, const ConvTile& tile, int64_t columns, const float* c, int64_t strip) {
  LinearArgs product = args.product;
  for (int64_t r = 0; r < tile.rows; ++r) {
    product.y = pixels_of(args.y, args.product.y.dtype, tile, r);
    product.residual = pixels_of(args.residual, args.product.y.dtype, tile, r);
    finish_block(product, c + r * columns * kStripColumns, 0, static_cast<int>(tile.columns), strip);
  }
}

template <class TX, class TW, class Left, class Products>
void run_tile(const Conv3dArgs& args, const ConvTile& tile, int64_t strip_begin, int64_t strip_end) {
  const TileShape shape(args, tile, sizeof(Left));
  const int entries = static_cast<int>((tile.rows - 1) * shape.columns + tile.columns);
  const int depth_tiles = static_cast<int>(args.product.weight.num_depth_tiles());
  const int64_t copy_bytes = round_up(shape.elements(args) * static_cast<int64_t>(sizeof(Left)), 64);
  const int64_t sum_bytes = int64_t{entries} * kStripColumns * static_cast<int64_t>(sizeof(float));
  const int64_t offset_bytes = int64_t{depth_tiles} * static_cast<int64_t>(sizeof(int64_t));
  char* scratch = static_cast<char*>(thread_scratch(copy_bytes + sum_bytes + offset_bytes));
  Left* copy = reinterpret_cast<Left*>(scratch);
  float* c = reinterpret_cast<float*>(scratch + copy_bytes);
  int64_t* offsets = reinterpret_cast<int64_t*>(scratch + copy_bytes + sum_bytes);

  const int64_t first = args.folded() ? 0 : first_frame_tap(args, tile);
  args.folded() ? copy_folded_tile<TX>(args, tile, shape, copy) : copy_tile<TX>(args, tile, shape, first, copy);
  find_depths(args, shape, offsets);
  const int first_depth = static_cast<int>(depth_tiles / args.kernel.frames * first);
  Products products(entries);
  for (int64_t s = strip_begin; s < strip_end; ++s) {
    const TW* weights = args.product.weight.strip<TW>(s);
    for (int begin = first_depth; begin < depth_tiles; begin += Products::kChunk) {
      const int count = depth_tiles - begin < Products::kChunk ? depth_tiles - begin : Products::kChunk;
      const Gathered<Left> left = {copy, offsets + begin};
      const TW* chunk = weights + int64_t{begin} * 2 * kTileElements;
      products.multiply(left, shape.pitch, entries, chunk, count, begin > first_depth, c);
    }
    finish_tile(args, tile, shape.columns, c, s);
  }
}

template <class TW>
void run_wide_tile(const Conv3dArgs& args, const ConvTile& tile, int64_t strip_begin, int64_t strip_end) {
  using Products = VectorProducts<TW, float>;
  args.product.x.dtype == DType::f32 ? run_tile<float, TW, float, Products>(args, tile, strip_begin, strip_end)
                                     : run_tile<bf16, TW, float, Products>(args, tile, strip_begin, strip_end);
}

// kBf16Products: as of linear_run.
template <bool kBf16Products = Vec::kHasBf16Dot>
void conv3d_run(const Conv3dArgs& args, const ConvTile& tile, int64_t strip_begin, int64_t strip_end) {
  if (args.product.weight.format == WeightFormat::f32) return run_wide_tile<float>(args, tile, strip_begin, strip_end);
  if constexpr (kBf16Products) {
    if (bf16_products(args.product))
      return run_tile<bf16, bf16, bf16, VectorProducts<bf16, bf16>>(args, tile, strip_begin, strip_end);
  }
  run_wide_tile<bf16>(args, tile, strip_begin, strip_end);
}

}  // namespace
}  // namespace tilewright
