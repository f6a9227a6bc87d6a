// Inputs of the gated delta rule: splits packed projections, and computes the gates.
//
//   split_projections   qkvz [T, 2 G K + 2 H V] and ba [T, 2 H] into q|k|v [T, 2 G K + H V], z [T, H V], b, a [T, H].
//                       contiguous:  q of all key heads, k of all, v of all value heads, z of all; b of all, a of all
//                       interleaved: for each key head its q, its k, the v of its value heads, their z; their b, their
//                       a
//   delta_gates         g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b), [T, H], in fp32
#pragma once

#include <cstdint>

#include "base/rows.h"

namespace tilewright {

struct SplitArgs {
  Rows qkvz, ba;
  Rows qkv, z, b, a;  // all six of one type
  int64_t num_tokens, key_heads, value_heads, key_width, value_width;
  bool interleaved;
};

void split_projections(const SplitArgs& args);

struct GatesArgs {
  Rows a, b;                    // of one type
  const void *a_log, *dt_bias;  // [H]
  DType a_log_dtype, dt_bias_dtype;
  Rows g, beta;  // fp32
  int64_t num_tokens, num_heads;
};

void delta_gates(const GatesArgs& args);

struct DeltaInputsKernels {
  void (*gates)(const GatesArgs& args, int64_t token_begin, int64_t token_end);
};

}  // namespace tilewright
