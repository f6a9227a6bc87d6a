// GroupNorm of pictures and clips, channels last: y = act((x - mean) / sqrt(var + eps) * weight + bias).
//
//   x, y [B, S, C] bf16 or fp32: items, pixels, channels; mean and variance of an item over its pixels and the C / G
//   channels of a group; weight, bias [C]
//
// Pixels are processed in chunks at fixed places, for any number of threads. Within a chunk sums are fp32, of
// differences from the chunk's first pixel, so that a mean far from 0 causes no cancellation; chunks are merged in
// order in double. So an item's bits depend neither on threads nor on other items. One rounding at the store.
#pragma once

#include <cstdint>

#include "base/activation.h"
#include "base/rows.h"

namespace tilewright {

struct GroupNormArgs {
  Rows x, y;                                      // rows are pixels, item after item; of one type; y may be x
  const void *weight = nullptr, *bias = nullptr;  // [C]; each may be null
  DType weight_dtype = DType::f32;                // of both
  int64_t batch = 0, pixels = 0, channels = 0, groups = 1;
  float eps = 0;
  Activation activation = Activation::none;
  bool stream = false;  // write y past the caches; set by group_norm, see base/stream.h
};

void group_norm(const GroupNormArgs& args);

// Mean and variance of each item's groups, statistics [B, G, 2]; y, weight and bias are not used.
struct GroupStatisticsArgs {
  GroupNormArgs norm;
  float* statistics = nullptr;
};

void group_statistics(const GroupStatisticsArgs& args);

// Mean of a group's values in a chunk, and the sum of their squared distances from it.
struct GroupStats {
  float mean, squares;
};

struct GroupNormKernels {
  // Computes the stats of each group [G] in some pixels of x.
  void (*stats)(const GroupNormArgs& args, int64_t row_begin, int64_t row_end, GroupStats* stats);
  // Computes y of some pixels of an item, whose table has three rows [C]: mean, factor, bias.
  void (*apply)(const GroupNormArgs& args, const float* table, int64_t row_begin, int64_t row_end);
};

}  // namespace tilewright
