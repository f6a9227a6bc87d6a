// A weight [N, K], fp32 or bf16, rounded to int8 (whole rows or groups), int4 or uint4, as ops/quantized.py says.
#pragma once

#include "base/packed_weight.h"
#include "base/rows.h"

namespace tilewright {

struct RoundArgs {
  Rows weight;
  PackedWeight form;            // without data: format, group size, n and k
  Rows values;                  // [N, K], a byte each
  Rows scales = {}, mins = {};  // [N, groups] of scale_dtype(); mins of uint4
};

void round_weight(const RoundArgs& args);

}  // namespace tilewright
