// Chooses experts and combines their outputs. Include after a Vec.
#pragma once

#include "base/vec/math.h"
#include "base/vec/row.h"
#include "kernels/moe/moe.h"

namespace tilewright {
namespace {

// NaN is worse than any number.
inline bool better(float a, float b) { return a > b || (b != b && a == a); }

// Finds the k largest of a row, largest first, the lower index first among equals. Few logits of a row enter the list,
// so it costs little more than one comparison each.
template <class T>
inline void take_largest(const T* logits, int64_t num_experts, int64_t k, int32_t* ids, float* values) {
  for (int64_t e = 0; e < num_experts; ++e) {
    const float value = to_float(logits[e]);
    if (e >= k && !better(value, values[k - 1])) continue;
    int64_t place = e < k ? e : k - 1;
    for (; place > 0 && better(value, values[place - 1]); --place) {
      values[place] = values[place - 1];
      ids[place] = ids[place - 1];
    }
    values[place] = value;
    ids[place] = static_cast<int32_t>(e);
  }
}

// Returns the sum of fn(value) over a row.
template <class T, class Fn>
inline float sum_of(const T* row, int64_t width, Fn fn) {
  return accumulate(width, [&](Vec sum, int64_t i, auto count) {
    return sum + keep_lanes(fn(load_some(row + i, count)), 0, count, Vec::zero());
  });
}

template <class T>
void route_token(const RouteArgs& args, int64_t token) {
  const T* logits = args.logits.row<T>(token);
  const int64_t k = args.top_k;
  float* weights = args.weights + token * k;
  take_largest(logits, args.num_experts, k, args.ids + token * k, weights);
  const Vec largest = Vec::set1(weights[0]);
  auto score = [&](Vec v) { return args.scoring == Scoring::softmax ? exp(v - largest) : sigmoid(v); };
  float total = 1.0f;
  if (args.renormalize)
    total = sum_of(weights, k, score);
  else if (args.scoring == Scoring::softmax)
    total = sum_of(logits, args.num_experts, score);
  for_each_vec(k, [&](int64_t i, auto count) {
    store_some(score(load_some(weights + i, count)) / Vec::set1(total), weights + i, count);
  });
}

void route_tokens(const RouteArgs& args, int64_t token_begin, int64_t token_end) {
  for (int64_t token = token_begin; token < token_end; ++token)
    args.logits.dtype == DType::bf16 ? route_token<bf16>(args, token) : route_token<float>(args, token);
}

template <class T>
void combine(const MoeArgs& args, const float* outputs, const int32_t* rows, int64_t token, int64_t column_begin,
             int64_t column_end) {
  const float* weights = args.weights + token * args.top_k;
  T* y = args.y.row<T>(token) + column_begin;
  const T* residual = args.residual ? args.residual.row<T>(token) + column_begin : nullptr;
  for_each_vec(column_end - column_begin, [&](int64_t i, auto count) {
    Vec sum = Vec::zero();
    for (int64_t j = 0; j < args.top_k; ++j) {
      const float* output = outputs + rows[j] * args.width() + column_begin;
      sum = fma(load_some(output + i, count), Vec::set1(weights[j]), sum);
    }
    if (residual) sum = sum + load_some(residual + i, count);
    store_some(sum, y + i, count);
  });
}

void combine_columns(const MoeArgs& args, const float* outputs, const int32_t* rows, int64_t token,
                     int64_t column_begin, int64_t column_end) {
  if (args.y.dtype == DType::bf16)
    combine<bf16>(args, outputs, rows, token, column_begin, column_end);
  else
    combine<float>(args, outputs, rows, token, column_begin, column_end);
}

}  // namespace
}  // namespace tilewright
