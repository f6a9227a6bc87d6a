// Rounds a weight [N, K], fp32 or bf16, to a format that has_rounding, by the rules of ops/quantized.py.
#pragma once

#include "base/packed_weight.h"
#include "base/rows.h"

namespace tilewright {

struct RoundArgs {
  Rows weight;
  PackedWeight form;            // without data: format, group size, n and k
  Rows values;                  // [N, num_quants()], a byte each
  Rows scales = {}, mins = {};  // [N, groups] of scale_dtype(); mins if the format has them
  Rows steps = {};              // as in PackArgs
};

void round_weight(const RoundArgs& args);

}  // namespace tilewright
