// Mixture of experts: routes tokens to experts, and computes the experts.
//
//   route  logits [T, E] -> the k best experts of each token and their weights, fp32 inside
//   moe    y[t] = residual[t] + sum over j of weights[t, j] * down_e(act(gate_e(x[t])) * up_e(x[t])), e = ids[t, j]
//
//   x [T, D] bf16 or fp32; each expert's gate|up [2I, D] and down [D, I] packed as linear packs them (base/tile.h), one
//   after the other; y [T, D]
//
// The products are linear's kernels over the gathered rows of an expert. Between the two products act(gate) * up has
// the type of x; the experts' outputs stay fp32 and are added in the order of ids[t], then the residual: one rounding.
// A token's result does not depend on other tokens.
#pragma once

#include <cstdint>

#include "base/activation.h"
#include "base/packed_weight.h"
#include "base/rows.h"

namespace tilewright {

enum class Scoring : int { softmax, sigmoid };

inline constexpr int kNumScorings = 2;

inline constexpr const char* name_of(Scoring scoring) { return scoring == Scoring::softmax ? "softmax" : "sigmoid"; }

struct RouteArgs {
  Rows logits;  // [T, E]
  int64_t num_tokens = 0, num_experts = 0, top_k = 0;
  Scoring scoring = Scoring::softmax;
  bool renormalize = false;  // the k weights of a token sum to 1
  int32_t* ids = nullptr;    // [T, k], best first, the lower one first among equals
  float* weights = nullptr;  // [T, k]
};

void route(const RouteArgs& args);

struct MoeArgs {
  Rows x;
  const int32_t* ids = nullptr;    // [T, k], each in [0, num_experts), as checked by the caller
  const float* weights = nullptr;  // [T, k]
  PackedWeight gate_up, down;      // [2I, D] gated and [D, I], each of E experts one after the other
  Rows residual;                   // dtype of y; may be y; optional
  Rows y;
  int64_t num_tokens = 0, num_experts = 0, top_k = 0;
  Activation activation = Activation::silu;

  TILEWRIGHT_INLINE int64_t width() const { return down.n; }  // D
  TILEWRIGHT_INLINE int64_t inner() const { return down.k; }  // I
};

void moe(const MoeArgs& args);

struct MoeKernels {
  void (*route)(const RouteArgs& args, int64_t token_begin, int64_t token_end);
  // Combines columns of one token: outputs holds rows of width() floats, of which rows[0..k) are the token's.
  void (*combine)(const MoeArgs& args, const float* outputs, const int32_t* rows, int64_t token, int64_t column_begin,
                  int64_t column_end);
};

}  // namespace tilewright
