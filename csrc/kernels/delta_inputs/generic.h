// The gates of the gated delta rule. Include after a Vec.
#pragma once

#include "base/vec/math.h"
#include "base/vec/row.h"
#include "kernels/delta_inputs/delta_inputs.h"

namespace tilewright {
namespace {

template <class Count>
inline Vec load_parameter(const void* values, DType dtype, int64_t i, Count count) {
  return dtype == DType::bf16 ? load_some(static_cast<const bf16*>(values) + i, count)
                              : load_some(static_cast<const float*>(values) + i, count);
}

template <class T>
void gates_as(const GatesArgs& args, int64_t token_begin, int64_t token_end) {
  for_each_vec(args.num_heads, [&](int64_t head, auto count) {
    const Vec rate = Vec::zero() - exp(load_parameter(args.a_log, args.a_log_dtype, head, count));
    const Vec bias = load_parameter(args.dt_bias, args.dt_bias_dtype, head, count);
    for (int64_t token = token_begin; token < token_end; ++token) {
      const Vec step = softplus(load_some(args.a.row<T>(token) + head, count) + bias);
      store_some(rate * step, args.g.row<float>(token) + head, count);
      store_some(sigmoid(load_some(args.b.row<T>(token) + head, count)), args.beta.row<float>(token) + head, count);
    }
  });
}

void gates(const GatesArgs& args, int64_t token_begin, int64_t token_end) {
  args.a.dtype == DType::bf16 ? gates_as<bf16>(args, token_begin, token_end)
                              : gates_as<float>(args, token_begin, token_end);
}

}  // namespace
}  // namespace tilewright
