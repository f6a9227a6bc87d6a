// Elementwise functions of rows: activations, gated activations, the residual add. fp32 inside, one rounding.
//
//   activate  y = f(x)                          x, y [rows, width]; y may be x
//   gate      y = f(x[:, :width]) * x[:, width:]  x [rows, 2 width], y [rows, width]
//   add       y = x + other                     y may be x or other
#pragma once

#include <cstdint>

#include "base/activation.h"
#include "base/dtype.h"

namespace tilewright {

struct ElementwiseArgs {
  const void* x = nullptr;
  const void* other = nullptr;  // add only
  void* y = nullptr;
  int64_t rows = 0, width = 0;
  int64_t x_stride = 0, other_stride = 0, y_stride = 0;  // between rows, in elements
  Activation activation = Activation::none;
  bool stream = false;  // write y past the caches; set by the functions below, see base/stream.h
  DType dtype;
};

void activate(const ElementwiseArgs& args);
void gate(const ElementwiseArgs& args);
void add(const ElementwiseArgs& args);

// Each computes columns [begin, end) of one row.
struct ActivationKernels {
  void (*activate)(const ElementwiseArgs& args, int64_t row, int64_t begin, int64_t end);
  void (*gate)(const ElementwiseArgs& args, int64_t row, int64_t begin, int64_t end);
  void (*add)(const ElementwiseArgs& args, int64_t row, int64_t begin, int64_t end);
};

}  // namespace tilewright
