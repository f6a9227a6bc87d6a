// Norms whose scale and shift are computed (adaptive norms of diffusion transformers), and the gated residual add.
//
//   ada_norm   y = norm(x) * (constant + scale) + shift, norm over the last axis:
//              LayerNorm (x - mean) / sqrt(var + eps), or RMSNorm x / sqrt(mean(x^2) + eps); times weight, plus bias
//              with a residual: residual += gate * x first, y is that of the new residual (as stored)
//   gated_add  y = residual + gate * x
//
// x, y, residual [T, D] of one type, bf16 or fp32. scale, shift and gate have a row for every `share` tokens, in either
// type: one for a sample, a frame or a token. Statistics and scaling in fp32, one rounding at each store.
#pragma once

#include <cstdint>

#include "base/rows.h"

namespace tilewright {

// Row t / share belongs to token t; no effect without rows.
struct Modulation {
  Rows rows;
  int64_t share = 1;
};

struct AdaNormArgs {
  Rows x, y;
  Rows residual;  // ada_norm: optional, updated; gated_add: read
  Modulation scale, shift, gate;
  Rows weight, bias;  // one row each, optional
  int64_t num_rows = 0, width = 0;
  float eps = 0, constant = 1;
  bool is_rms = false;
  bool stream = false;  // write y past the caches; set by the functions below, see base/stream.h
};

void ada_norm(const AdaNormArgs& args);
void gated_add(const AdaNormArgs& args);

struct AdaNormKernels {
  void (*ada_norm)(const AdaNormArgs& args, int64_t row_begin, int64_t row_end);
  void (*gated_add)(const AdaNormArgs& args, int64_t row_begin, int64_t row_end);
};

}  // namespace tilewright
