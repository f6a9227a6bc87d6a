// Packed linear on vectors. Include after a Vec.
#pragma once

#include "base/dot.h"
#include "base/scratch.h"
#include "kernels/linear/epilogue.h"
#include "kernels/linear/quantized.h"
#include "kernels/linear/widened.h"

namespace tilewright {
namespace {

int64_t linear_block_bytes(const LinearArgs& args) {
  if (rounds_x(args.weight.format)) return quantized_block_bytes(args);
  return kRowBlock * args.weight.num_depth_tiles() * kTileDepth * (bf16_products(args) ? 2 : 4);
}

// Packs rows of x, converted and padded with zeros to whole depth tiles.
template <class TX, class Left>
void pack_rows(const LinearArgs& args, int64_t block, Left* packed) {
  const int64_t width = args.weight.num_depth_tiles() * kTileDepth;
  for (int r = 0; r < rows_in_block(args, block); ++r, packed += width) {
    const TX* x = row_of_x<TX>(args, block * kRowBlock + r);
    int64_t i = 0;
    for (; i + Vec::kLanes <= args.weight.k; i += Vec::kLanes) Vec::load(x + i).store(packed + i);
    for (; i < width; i += Vec::kLanes)
      Vec::load(x + i, args.weight.k - i < 0 ? 0 : args.weight.k - i).store(packed + i);
  }
}

void linear_pack_block(const LinearArgs& args, int64_t block, void* packed) {
  if (rounds_x(args.weight.format))
    quantized_pack_block(args, block, packed);
  else if (bf16_products(args))
    pack_rows<bf16>(args, block, static_cast<bf16*>(packed));
  else if (args.x.dtype == DType::f32)
    pack_rows<float>(args, block, static_cast<float*>(packed));
  else
    pack_rows<bf16>(args, block, static_cast<float*>(packed));
}

// Tiles of depth that all rows are multiplied by before the next ones.
inline int tiles_at_once(const LinearArgs& args, int64_t rows) {
  constexpr int kPart = DotTraits::kDepthTiles;
  const int depth_tiles = static_cast<int>(args.weight.num_depth_tiles());
  return kPart > 0 && rows > kDotRows && depth_tiles > kPart ? kPart : depth_tiles;
}

// c [rows, 32] = x times a strip; tiles(begin, count) points to those tiles of depth, up to `step` at a time.
template <class Left, class Tiles>
void multiply_rows(const Left* x, int64_t width, int rows, int depth_tiles, int step, Tiles tiles, float* c) {
  for (int begin = 0; begin < depth_tiles; begin += step) {
    const int count = depth_tiles - begin < step ? depth_tiles - begin : step;
    const auto* from = tiles(begin, count);
    using TB = std::remove_cvref_t<decltype(*from)>;
    multiply_tiles<TB>(x + begin * kTileDepth, width, rows, StripTiles<TB>{from}, 2, count, c, kStripColumns,
                       begin > 0);
  }
}

// Multiplies all rows of the blocks by one strip; tiles(row, begin, count) is as above, for the rows from `row` on.
template <class Left, class Tiles>
void multiply_strip(const LinearArgs& args, const Left* x, int64_t block_begin, int64_t block_end, int64_t strip,
                    int step, Tiles tiles) {
  const int depth_tiles = static_cast<int>(args.weight.num_depth_tiles());
  const int64_t width = int64_t{depth_tiles} * kTileDepth;
  const int64_t end = end_row(args, block_end);
  alignas(64) float c[kRowsAtOnce * kStripColumns];
  for (int64_t row = block_begin * kRowBlock; row < end; row += kRowsAtOnce) {
    const int rows = static_cast<int>(end - row < kRowsAtOnce ? end - row : kRowsAtOnce);
    multiply_rows(
        x + row * width, width, rows, depth_tiles, step, [&](int begin, int count) { return tiles(row, begin, count); },
        c);
    finish_block(args, c, row, rows, strip);
  }
}

// Multiplies strips as stored.
template <class TW, class Left>
void run_strips(const LinearArgs& args, const void* packed_x, int64_t block_begin, int64_t block_end,
                int64_t strip_begin, int64_t strip_end) {
  const int step = tiles_at_once(args, rows_of_blocks(args, block_begin, block_end));
  for (int64_t s = strip_begin; s < strip_end; ++s) {
    const TW* strip = args.weight.strip<TW>(s);
    multiply_strip(args, static_cast<const Left*>(packed_x), block_begin, block_end, s, step,
                   [&](int64_t, int begin, int) { return strip + begin * 2 * kTileElements; });
  }
}

// Converts tiles of depth of a strip to fp32.
inline void widen_tiles(const bf16* strip, int begin, int count, float* wide) {
  for (int tile = 0; tile < 2 * count; ++tile)
    widen_tile(strip + (2 * begin + tile) * kTileElements, wide + tile * kTileElements);
}

// Multiplies strips of a narrower type whose tiles become fp32 first: all of a strip once, or a few tiles at a time,
// which stay in the L1 cache.
template <class TW, class WidenTiles>
void run_widened_strips(const LinearArgs& args, const void* packed_x, int64_t block_begin, int64_t block_end,
                        int64_t strip_begin, int64_t strip_end, WidenTiles widen_tiles) {
  const int64_t first_row = block_begin * kRowBlock;
  const int step = tiles_at_once(args, rows_of_blocks(args, block_begin, block_end));
  float* wide = static_cast<float*>(thread_scratch(int64_t{step} * 2 * kTileElements * sizeof(float)));
  for (int64_t s = strip_begin; s < strip_end; ++s) {
    const TW* strip = args.weight.strip<TW>(s);
    const auto widen = [&](int64_t row, int begin, int count) {
      if (row == first_row || step < args.weight.num_depth_tiles()) widen_tiles(strip, begin, count, wide);
      return wide;
    };
    multiply_strip(args, static_cast<const float*>(packed_x), block_begin, block_end, s, step, widen);
  }
}

// fp32 products of bf16 weights, which are converted to fp32 first if enough rows use them.
void linear_run_wide(const LinearArgs& args, const void* packed_x, int64_t block_begin, int64_t block_end,
                     int64_t strip_begin, int64_t strip_end) {
  if (rows_of_blocks(args, block_begin, block_end) >= kRowsToWiden)
    run_widened_strips<bf16>(args, packed_x, block_begin, block_end, strip_begin, strip_end, widen_tiles);
  else
    run_strips<bf16, float>(args, packed_x, block_begin, block_end, strip_begin, strip_end);
}

// kBf16Products: not of a level that has something better for bf16_products and does not come here with them.
template <bool kBf16Products = Vec::kHasBf16Dot>
void linear_run(const LinearArgs& args, const void* packed_x, int64_t block_begin, int64_t block_end,
                int64_t strip_begin, int64_t strip_end) {
  if (rounds_x(args.weight.format))
    return quantized_run(args, packed_x, block_begin, block_end, strip_begin, strip_end);
  if (is_widened(args.weight.format))
    return widened_run<kBf16Products>(args, packed_x, block_begin, block_end, strip_begin, strip_end);
  if (args.weight.format == WeightFormat::f32)
    return run_strips<float, float>(args, packed_x, block_begin, block_end, strip_begin, strip_end);
  if constexpr (kBf16Products) {
    if (bf16_products(args))
      return run_strips<bf16, bf16>(args, packed_x, block_begin, block_end, strip_begin, strip_end);
  }
  linear_run_wide(args, packed_x, block_begin, block_end, strip_begin, strip_end);
}

}  // namespace
}  // namespace tilewright
