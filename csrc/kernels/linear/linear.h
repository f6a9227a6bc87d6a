// Packed linear: y = epilogue(x W^T + b), fp32 accumulation, one rounding at the store.
//
//   x [M, K] bf16 or fp32, W [N, K] packed (base/tile.h) in bf16, fp32 or quantised, y [M, N], any M, N, K
//   epilogue: + bias, then an activation or, for gate|up weights, act(gate) * up (y is [M, N / 2]), then + residual
//
// With x and W in bf16 the products run on the machine's bf16 units, or in fp16 if it only has those faster than fp32's
// (neon_dotprod.cc); with fp32 x everything is fp32. With a quantised W x is rounded to bytes, and the products run on
// the machine's units for those (quantized.h); but W in fp8 or int8_exact is converted to bf16, tile by tile, and
// multiplied as that (widened.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/activation.h"
#include "base/packed_weight.h"
#include "base/rows.h"

namespace tilewright {

struct LinearArgs {
  Rows x;
  PackedWeight weight;
  const float* bias = nullptr;  // fp32 in packed order, padded to whole strips; or null
  Rows residual;                // dtype and columns of y; optional
  Rows y;
  int64_t m = 0;
  Activation activation = Activation::none;
  const int32_t* x_rows = nullptr;     // [m]: row i of the product is this row of x; null: row i
  const int32_t* x_columns = nullptr;  // [K]: column of x for column i of W; for formats that round x
};

void linear(const LinearArgs& args);

// Rows of x are processed in blocks of 32: two row tiles of 16, the largest unit's operand.
inline constexpr int kRowBlock = 32;

// Tiles of depth processed at a time, 2,048 deep: with more, too few blocks of x would fit L2 beside their weights.
inline constexpr int kDepthChunk = 64;

struct LinearKernels {
  const char* product;  // of bf16 weights, for the kernel's name (base/product_name.h)
  // The layout of bf16 weights at this level: cached ones are reused only by a level with the same layout. Other
  // weights are tiles at every level.
  WeightLayout bf16_layout;
  // x as the kernel reads it, in blocks of kRowBlock rows.
  int64_t (*block_bytes)(const LinearArgs& args);
  void (*pack_block)(const LinearArgs& args, int64_t block, void* packed_block);
  // Computes all outputs of a range of row blocks and a range of strips.
  void (*run)(const LinearArgs& args, const void* packed_x, int64_t block_begin, int64_t block_end, int64_t strip_begin,
              int64_t strip_end);
};

// The active kernels, for ops built on packed products.
const LinearKernels& linear_kernels();

// Row blocks of x that a task keeps in L2 for all its strips of weights.
int64_t blocks_per_group(const LinearArgs& args, int64_t block_bytes, int64_t num_blocks);

struct PackArgs {
  Rows weight;  // [N, K]; of a quantised format its quants, a byte each
  PackedWeight packed;
  Rows scales = {}, mins = {};  // [N, groups] of scale_dtype(), of a quantised format and of one with mins
  Rows steps = {};              // [N, 2 groups] bytes: steps, then bases. With them scales are [N, 1] in fp32
};

// Layout of weights of a format at the active level.
WeightLayout layout_of(WeightFormat format);

void pack_weight(const PackArgs& args);
// The reverse: reads `packed`, writes `weight`, for a quantised format the values of its quants, in fp32 or bf16.
void unpack_weight(const PackArgs& args);

}  // namespace tilewright
