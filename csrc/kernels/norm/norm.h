// RMSNorm and LayerNorm over the last axis. Statistics and scaling in fp32, one rounding at the store.
//
//   rms_norm    y = x / sqrt(mean(x^2) + eps) * w            (w + 1 when weight_plus_one)
//               with a residual: residual += x first, y is the norm of the new residual (as stored)
//               with a gate:     y *= silu(gate)
//               with an activation: y = act(y)
//   layer_norm  y = (x - mean) / sqrt(var + eps) * w + b
//
// Rows are [outer, inner] with a stride each, so that the heads of a packed qkv row are normed in place.
#pragma once

#include <cstdint>

#include "base/activation.h"
#include "base/rows.h"

namespace tilewright {

struct NormArgs {
  Heads x, y;                                     // rows are [outer, inner]; x, y, residual, gate of one type
  Heads residual;                                 // rms_norm only, optional, updated
  Heads gate;                                     // rms_norm only, optional
  const void *weight = nullptr, *bias = nullptr;  // bias: layer_norm only, optional
  int64_t outer = 0, inner = 1, width = 0;
  float eps = 0;
  bool weight_plus_one = false;
  Activation activation = Activation::none;  // rms_norm only
  bool stream = false;  // write y past the caches; set by rms_norm and layer_norm, see base/stream.h
  DType weight_dtype;   // of weight, bias
};

void rms_norm(const NormArgs& args);
void layer_norm(const NormArgs& args);

struct NormKernels {
  void (*rms_norm)(const NormArgs& args, int64_t row_begin, int64_t row_end);
  void (*layer_norm)(const NormArgs& args, int64_t row_begin, int64_t row_end);
};

}  // namespace tilewright
