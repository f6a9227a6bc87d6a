// Rounds a weight [N, K], fp32 or bf16, to int8 (whole rows, rotated or not, or groups), int4, rotated or not, or
// uint4, by the rules of ops/quantized.py.
#pragma once

#include "base/packed_weight.h"
#include "base/rows.h"

namespace tilewright {

struct RoundArgs {
  Rows weight;
  PackedWeight form;            // without data: format, group size, n and k
  Rows values;                  // [N, num_quants()], a byte each
  Rows scales = {}, mins = {};  // [N, groups] of scale_dtype(); mins of uint4
  Rows steps = {};              // as in PackArgs
};

inline constexpr bool has_rounding(WeightFormat format) {
  return format == WeightFormat::int8 || format == WeightFormat::int8_rotated || format == WeightFormat::int4 ||
         format == WeightFormat::uint4 || format == WeightFormat::int4_rotated;
}

void round_weight(const RoundArgs& args);

}  // namespace tilewright
