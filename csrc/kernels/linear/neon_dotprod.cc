// Linear in fp16 (base/arm/half_product.h): NEON with fp16 but no bf16 arithmetic has twice as many of these products
// per cycle as of fp32, and weights are read without conversion.
//
// Rows of W are stored as halves times a power of two (WeightLayout), and rows of x are converted to such
// (base/arm/half_rows.h): no sum of 64 products exceeds 2^15.
#include "kernels/level.h"

#include TILEWRIGHT_VEC
#include TILEWRIGHT_QUADS

#include "base/arm/half_product.h"
#include "base/arm/half_rows.h"
#include "kernels/linear/generic.h"

namespace tilewright {
namespace {

bool by_halves(const LinearArgs& args) {
  return args.weight.layout == WeightLayout::halves && args.x.dtype == DType::bf16;
}

// A row of x as it is multiplied: depth() halves, and in the line after them the factor of its results.
constexpr int64_t kRowTail = 32;

int64_t row_stride(const LinearArgs& args) { return args.weight.depth() + kRowTail; }

int64_t block_bytes(const LinearArgs& args) {
  return by_halves(args) ? kRowBlock * row_stride(args) * static_cast<int64_t>(sizeof(f16)) : linear_block_bytes(args);
}

void pack_halves(const LinearArgs& args, int64_t block, f16* packed) {
  const int64_t k = args.weight.k, width = args.weight.depth();
  for (int r = 0; r < rows_in_block(args, block); ++r, packed += row_stride(args)) {
    const bf16* x = row_of_x<bf16>(args, block * kRowBlock + r);
    HalfScale scale;
    scale.include(x, k);
    store_halves(x, k, width, scale.inverse(), packed);
    const float multiplier = scale.multiplier();
    __builtin_memcpy(packed + width, &multiplier, sizeof(multiplier));
  }
}

void pack_block(const LinearArgs& args, int64_t block, void* packed) {
  by_halves(args) ? pack_halves(args, block, static_cast<f16*>(packed)) : linear_pack_block(args, block, packed);
}

// Rows of x that are multiplied by all columns of a strip at a time, which is 16 sums. More rows use half of the
// columns, eight at a time.
constexpr int kFewRows = 4;

// c [rows, 32] = or += rows of x times `count` depths of a strip.
void multiply_depths(const f16* x, int64_t stride, int rows, const f16* strip, int64_t count, bool accumulate,
                     float* c) {
  const auto multiply = [&](int row, auto num_rows, auto num_vecs, int column) {
    multiply_halves<num_rows.value, num_vecs.value, kStripColumns>(
        x + row * stride, stride, [=](int64_t depth) { return strip + depth * kStripColumns + column; }, count,
        accumulate, c + row * kStripColumns + column, kStripColumns);
  };
  using Half = std::integral_constant<int, kTileColumns / HalfVec::kLanes>;
  using Whole = std::integral_constant<int, kStripColumns / HalfVec::kLanes>;
  if (rows <= kFewRows) return with_rows<kFewRows>(rows, [&](auto num_rows) { multiply(0, num_rows, Whole{}, 0); });
  for (int column = 0; column < kStripColumns; column += kTileColumns)
    for_row_blocks(rows, [&](int row, auto num_rows) { multiply(row, num_rows, Half{}, column); });
}

// Depths that all rows are multiplied by before the next ones. Few rows wait for them to come from memory, which works
// best if prefetched data is used soon; many share as much as stays in the L1 cache.
constexpr int64_t kFewDepths = 64, kManyDepths = 256;

void run_halves(const LinearArgs& args, const f16* packed_x, int64_t block_begin, int64_t block_end,
                int64_t strip_begin, int64_t strip_end) {
  const int64_t stride = row_stride(args), depth = args.weight.depth(), end = end_row(args, block_end);
  const int64_t all_rows = rows_of_blocks(args, block_begin, block_end);
  const int64_t step = all_rows <= kFewRows ? depth : all_rows <= kRowBlock ? kFewDepths : kManyDepths;
  alignas(64) float c[kRowsAtOnce * kStripColumns];
  for (int64_t s = strip_begin; s < strip_end; ++s) {
    const f16* strip = args.weight.strip<f16>(s);
    for (int64_t row = block_begin * kRowBlock; row < end; row += kRowsAtOnce) {
      const int rows = static_cast<int>(end - row < kRowsAtOnce ? end - row : kRowsAtOnce);
      const f16* x = packed_x + row * stride;
      for (int64_t begin = 0; begin < depth; begin += step)
        multiply_depths(x + begin, stride, rows, strip + begin * kStripColumns,
                        depth - begin < step ? depth - begin : step, begin > 0, c);
      for (int r = 0; r < rows; ++r) {
        float scale;
        __builtin_memcpy(&scale, x + r * stride + depth, sizeof(scale));
        float* sums = c + r * kStripColumns;
        for (int i = 0; i < kStripColumns; i += Vec::kLanes) (Vec::load(sums + i) * Vec::set1(scale)).store(sums + i);
      }
      finish_block(args, c, row, rows, s);
    }
  }
}

// Like widen_tiles of bf16, for rows of x in fp32.
void widen_halves(const f16* strip, int begin, int count, float* wide) {
  const f16* from = strip + begin * kTileDepth * kStripColumns;
  for (int64_t depth = 0; depth < count * kTileDepth; ++depth)
    for (int column = 0; column < kStripColumns; column += Vec::kLanes, from += Vec::kLanes) {
      const int64_t tile = depth / kTileDepth * 2 + column / kTileColumns;
      const int within = tile_offset<float>(static_cast<int>(depth % kTileDepth), column % kTileColumns);
      load_halves(from).store(wide + tile * kTileElements + within);
    }
}

void run(const LinearArgs& args, const void* packed_x, int64_t block_begin, int64_t block_end, int64_t strip_begin,
         int64_t strip_end) {
  if (args.weight.layout != WeightLayout::halves)
    return linear_run(args, packed_x, block_begin, block_end, strip_begin, strip_end);
  if (by_halves(args))
    return run_halves(args, static_cast<const f16*>(packed_x), block_begin, block_end, strip_begin, strip_end);
  run_widened_strips<f16>(args, packed_x, block_begin, block_end, strip_begin, strip_end, widen_halves);
}

}  // namespace

TILEWRIGHT_KERNELS(linear, LinearKernels) = {kHalfProduct.text, WeightLayout::halves, block_bytes, pack_block, run};
}  // namespace tilewright
