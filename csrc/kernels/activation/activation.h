// Elementwise functions of rows: activations, gated activations, the residual add. fp32 inside, one rounding.
//
//   activate  y = f(x)                          x, y [rows, width]; y may be x
//   gate      y = f(x[:, :width]) * x[:, width:]  x [rows, 2 width], y [rows, width]
//   add       y = x + other                     y may be x or other
//   sigmoid_gate  y = x * sigmoid(gate)         x, y [outer, inner, width], gate the same or of width 1; y may be x
//   snake     y = x + sin(scale x)^2 * share    x, y [outer, inner, width], scale and share fp32 [width]; y may be x
#pragma once

#include <cstdint>

#include "base/activation.h"
#include "base/rows.h"

namespace tilewright {

struct ElementwiseArgs {
  Rows x, y;   // of one type, as
  Rows other;  // add only
  int64_t rows = 0, width = 0;
  Activation activation = Activation::none;
  bool stream = false;  // write y past the caches; set by the functions below, see base/stream.h
};

struct SigmoidGateArgs {
  Heads x, gate, y;
  int64_t outer = 0, inner = 0, width = 0;
  bool one_per_row = false;  // gate has a width of 1
};

struct SnakeArgs {
  Heads x, y;  // of one type
  const float *scale = nullptr, *share = nullptr;
  int64_t outer = 0, inner = 0, width = 0;
};

void activate(const ElementwiseArgs& args);
void gate(const ElementwiseArgs& args);
void add(const ElementwiseArgs& args);
void sigmoid_gate(const SigmoidGateArgs& args);
void snake(const SnakeArgs& args);

// The first three compute columns [begin, end) of one row, the others rows [begin, end).
struct ActivationKernels {
  void (*activate)(const ElementwiseArgs& args, int64_t row, int64_t begin, int64_t end);
  void (*gate)(const ElementwiseArgs& args, int64_t row, int64_t begin, int64_t end);
  void (*add)(const ElementwiseArgs& args, int64_t row, int64_t begin, int64_t end);
  void (*sigmoid_gate)(const SigmoidGateArgs& args, int64_t begin, int64_t end);
  void (*snake)(const SnakeArgs& args, int64_t begin, int64_t end);
};

}  // namespace tilewright
