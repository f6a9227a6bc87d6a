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

// Rows of x, converted and padded with zeros to whole depth tiles.
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

// multiply(accumulate, begin, count) for as many tiles of depth at a time as the L1 cache keeps from one kDotRows to
// the next.
template <class Multiply>
inline void multiply_in_parts(int depth_tiles, Multiply multiply) {
  constexpr int kPart = DotTraits::kDepthTiles;
  multiply(std::false_type{}, 0, depth_tiles < kPart ? depth_tiles : kPart);
  for (int begin = kPart; begin < depth_tiles; begin += kPart)
    multiply(std::true_type{}, begin, depth_tiles - begin < kPart ? depth_tiles - begin : kPart);
}

template <class TB, class Left>
void multiply_strip(const LinearArgs& args, const Left* x, const TB* strip, int64_t block_begin, int64_t block_end,
                    int64_t strip_index) {
  const int depth_tiles = static_cast<int>(args.weight.num_depth_tiles());
  const int64_t width = int64_t{depth_tiles} * kTileDepth;
  const int64_t end = block_end * kRowBlock < args.m ? block_end * kRowBlock : args.m;
  alignas(64) float c[kRowsAtOnce * kStripColumns];
  for (int64_t row = block_begin * kRowBlock; row < end; row += kRowsAtOnce) {
    const int rows = static_cast<int>(end - row < kRowsAtOnce ? end - row : kRowsAtOnce);
    const auto multiply = [&](auto accumulate, int begin, int count) {
      multiply_tiles<TB, accumulate.value>(
          x + row * width + begin * kTileDepth, width, rows,
          [&](int d, int j) { return strip + ((begin + d) * 2 + j) * kTileElements; }, 2, count, c, kStripColumns);
    };
    if constexpr (DotTraits::kDepthTiles > 0) {
      if (rows > kDotRows) {
        multiply_in_parts(depth_tiles, multiply);
        finish_block(args, c, row, rows, strip_index);
        continue;
      }
    }
    multiply(std::false_type{}, 0, depth_tiles);
    finish_block(args, c, row, rows, strip_index);
  }
}

// fp32 products: bf16 weights are turned into fp32 tiles once per strip when enough rows will use them.
template <class TW>
void linear_run_wide(const LinearArgs& args, const void* packed_x, int64_t block_begin, int64_t block_end,
                     int64_t strip_begin, int64_t strip_end) {
  const float* x = static_cast<const float*>(packed_x);
  const int64_t strip_elements = args.weight.strip_elements();
  const int64_t rows = (block_end * kRowBlock < args.m ? block_end * kRowBlock : args.m) - block_begin * kRowBlock;
  const bool widen = std::is_same_v<TW, bf16> && rows >= kRowsToWiden;
  float* wide = widen ? static_cast<float*>(thread_scratch(strip_elements * sizeof(float))) : nullptr;
  for (int64_t s = strip_begin; s < strip_end; ++s) {
    const TW* strip = args.weight.strip<TW>(s);
    if constexpr (std::is_same_v<TW, bf16>) {
      if (widen) {
        for (int64_t tile = 0; tile < strip_elements; tile += kTileElements) widen_tile(strip + tile, wide + tile);
        multiply_strip<float>(args, x, wide, block_begin, block_end, s);
        continue;
      }
    }
    multiply_strip<TW>(args, x, strip, block_begin, block_end, s);
  }
}

void linear_run(const LinearArgs& args, const void* packed_x, int64_t block_begin, int64_t block_end,
                int64_t strip_begin, int64_t strip_end) {
  if (rounds_x(args.weight.format))
    return quantized_run(args, packed_x, block_begin, block_end, strip_begin, strip_end);
  if (is_widened(args.weight.format))
    return widened_run(args, packed_x, block_begin, block_end, strip_begin, strip_end);
  if (args.weight.format == WeightFormat::f32)
    return linear_run_wide<float>(args, packed_x, block_begin, block_end, strip_begin, strip_end);
  if constexpr (Vec::kHasBf16Dot) {
    if (bf16_products(args)) {
      for (int64_t s = strip_begin; s < strip_end; ++s)
        multiply_strip<bf16>(args, static_cast<const bf16*>(packed_x), args.weight.strip<bf16>(s), block_begin,
                             block_end, s);
      return;
    }
  }
  linear_run_wide<bf16>(args, packed_x, block_begin, block_end, strip_begin, strip_end);
}

}  // namespace
}  // namespace tilewright
