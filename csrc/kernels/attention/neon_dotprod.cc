// Variable-length attention of bf16 inputs in fp16 (base/arm/half_product.h), of which NEON has twice as many products
// per cycle as of fp32. A head's keys are divided by one power of two and its values by another (base/arm/half_rows.h),
// per sequence, and each query by its own: the scale of a row of scores includes them, except that of the values, by
// which the output is multiplied. Softmax weights are at most 1, so no sum of 64 products exceeds 32.
#include "kernels/level.h"

#include TILEWRIGHT_VEC

#include "base/arm/half_product.h"
#include "base/arm/half_rows.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/vector_products.h"

namespace tilewright {
namespace {

template <>
struct Products<f16> {
  using Left = f16;
  explicit Products(int) {}

  void multiply(const f16* a, int64_t lda, int rows, PagedTiles<f16> tile_at, int column_tiles, int depth_tiles,
                float* c, int64_t ldc) {
    for (int j = 0; j < column_tiles; ++j, c += kTileColumns) {
      const auto tile_of = [&](int64_t depth) { return tile_at(static_cast<int>(depth / kTileDepth), j); };
      for_row_blocks(rows, [&](int row, auto num_rows) {
        multiply_halves<num_rows.value, kTileColumns / HalfVec::kLanes, kTileColumns>(
            a + row * lda, lda, tile_of, depth_tiles * kTileDepth, false, c + row * ldc, ldc);
      });
    }
  }
};

inline float load_query(const bf16* q, int64_t width, int64_t depth, float sign, f16* to) {
  HalfScale scale;
  scale.include(q, width);
  store_halves(q, width, depth, sign * scale.inverse(), to);
  return scale.multiplier();
}

}  // namespace
}  // namespace tilewright

#include "kernels/attention/generic.h"

namespace tilewright {
namespace {

HalfScale scale_of(const Heads& heads, int64_t begin, int64_t end, int64_t head, int64_t width) {
  HalfScale scale;
  for (int64_t token = begin; token < end; ++token) scale.include(heads.row<bf16>(token, head), width);
  return scale;
}

HeadScales scale_head(const VarlenArgs& args, int64_t sequence, int64_t head) {
  const int64_t begin = args.key_starts[sequence], end = args.key_starts[sequence + 1];
  const int64_t width = args.attention.layout.head_width;
  return {scale_of(args.k, begin, end, head, width).multiplier(),
          scale_of(args.v, begin, end, head, width).multiplier()};
}

bool by_halves(const VarlenArgs& args) { return args.attention.kv_dtype == DType::f16; }

void pack_keys_or_halves(const VarlenArgs& args, const TokenPiece& piece, int64_t head, void* tiles) {
  if (!by_halves(args)) return pack_keys(args, piece, head, tiles);
  const KvLayout& layout = args.attention.layout;
  const int64_t depth = layout.key_depth_tiles() * kTileDepth;
  const float inverse = 1.0f / args.attention.scales(piece.sequence, head).keys;  // exact: a power of two
  f16* const to = static_cast<f16*>(tiles);
  if (piece.count < kTileDepth) __builtin_memset(to, 0, kTileDepth * depth * sizeof(f16));
  for (int64_t i = 0; i < piece.count; ++i) {
    f16 row[kMaxHeadWidth];
    store_halves(args.k.row<bf16>(piece.token + i, head), layout.head_width, depth, inverse, row);
    f16* column = to + i / kTileColumns * kTileColumns * depth + i % kTileColumns;
    for (int64_t d = 0; d < depth; ++d) column[d * kTileColumns] = row[d];
  }
}

void pack_values_or_halves(const VarlenArgs& args, const TokenPiece& piece, int64_t head, void* tiles) {
  if (!by_halves(args)) return pack_values(args, piece, head, tiles);
  const KvLayout& layout = args.attention.layout;
  const int64_t column_tiles = layout.value_column_tiles();
  const float inverse = 1.0f / args.attention.scales(piece.sequence, head).values;
  f16* const to = static_cast<f16*>(tiles);
  if (piece.count < kTileDepth) __builtin_memset(to, 0, column_tiles * kTileElements * sizeof(f16));
  for (int64_t i = 0; i < piece.count; ++i) {
    const bf16* v = args.v.row<bf16>(piece.token + i, head);
    for (int64_t j = 0; j < column_tiles; ++j) {
      const int64_t left = layout.head_width - j * kTileColumns;
      store_halves(v + j * kTileColumns, left < kTileColumns ? left : kTileColumns, kTileColumns, inverse,
                   to + j * kTileElements + i * kTileColumns);
    }
  }
}

void run_some_items(const AttentionArgs& args, const AttentionItem* items, int count) {
  args.kv_dtype == DType::f16 ? run_some<f16>(args, items, count) : run_items(args, items, count);
}

}  // namespace

TILEWRIGHT_KERNELS(attention, AttentionKernels) = {kHalfProduct.text,   run_some_items,        merge_item,
                                                   pack_keys_or_halves, pack_values_or_halves, scale_head};
}  // namespace tilewright
