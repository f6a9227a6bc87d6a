// The norm of a range of rows in terms of Vec; each ISA file includes this after its Vec.
#pragma once

#include <cmath>

#include "base/vec/activation.h"
#include "base/vec/row.h"
#include "kernels/norm/norm.h"

namespace tilewright {
namespace {

template <class T>
T* row_of(const Heads& rows, int64_t inner, int64_t row) {
  return rows ? rows.row<T>(row / inner, row % inner) : nullptr;
}

template <class T, class W>
void rms_norm_row(const NormArgs& args, int64_t row) {
  const T* x = row_of<T>(args.x, args.inner, row);
  T* y = row_of<T>(args.y, args.inner, row);
  T* residual = row_of<T>(args.residual, args.inner, row);
  const T* gate = row_of<T>(args.gate, args.inner, row);
  const W* weight = static_cast<const W*>(args.weight);
  const T* next = row_of<T>(args.x, args.inner, row + 1);
  const T* next_residual = row_of<T>(args.residual, args.inner, row + 1);

  const T* source = x;
  float squares;
  if (residual) {
    squares = accumulate(args.width, [&](Vec sum, int64_t i, auto count) {
      store_some(load_some(x + i, count) + load_some(residual + i, count), residual + i, count);
      const Vec v = load_some(residual + i, count);  // as rounded: what the next layer will read
      return fma(v, v, sum);
    });
    source = residual;
  } else {
    squares = sum_of_squares(x, args.width);
  }
  const Vec scale = Vec::set1(1.0f / std::sqrt(squares / static_cast<float>(args.width) + args.eps));
  const Vec offset = Vec::set1(args.weight_plus_one ? 1.0f : 0.0f);
  with_streaming(args.stream, y, [&](auto streaming) {
    for_each_vec(args.width, [&](int64_t i, auto count) {
      Vec v = load_some(source + i, count) * scale * (load_some(weight + i, count) + offset);
      if (gate) v = v * silu(load_some(gate + i, count));
      v = apply_activation<kIsBf16<T>>(v, args.activation);
      prefetch(next + i);
      if (next_residual) prefetch(next_residual + i);
      store_some(v, y + i, count, streaming);
    });
  });
}

template <class T, class W>
void layer_norm_row(const NormArgs& args, int64_t row) {
  const T* x = row_of<T>(args.x, args.inner, row);
  T* y = row_of<T>(args.y, args.inner, row);
  const W* weight = static_cast<const W*>(args.weight);
  const W* bias = static_cast<const W*>(args.bias);
  const float width = static_cast<float>(args.width);

  const T* next = row_of<T>(args.x, args.inner, row + 1);
  const float total =
      accumulate(args.width, [&](Vec sum, int64_t i, auto count) { return sum + load_some(x + i, count); });
  const Vec mean = Vec::set1(total / width);
  // A second pass over a row in L1 is cheap and has none of the cancellation of mean(x^2) - mean(x)^2.
  const float squares = accumulate(args.width, [&](Vec sum, int64_t i, auto count) {
    const Vec d = keep_lanes(load_some(x + i, count) - mean, 0, count, Vec::zero());
    return fma(d, d, sum);
  });
  const Vec scale = Vec::set1(1.0f / std::sqrt(squares / width + args.eps));
  with_streaming(args.stream, y, [&](auto streaming) {
    for_each_vec(args.width, [&](int64_t i, auto count) {
      prefetch(next + i);
      const Vec shift = bias ? load_some(bias + i, count) : Vec::zero();
      const Vec v = fma((load_some(x + i, count) - mean) * scale, load_some(weight + i, count), shift);
      store_some(v, y + i, count, streaming);
    });
  });
}

// Calls fn(T{}, W{}) for the element types of args.
template <class Fn>
inline void with_types(const NormArgs& args, Fn fn) {
  const bool wide_weight = args.weight_dtype == DType::f32;
  if (args.x.dtype == DType::f32) return wide_weight ? fn(float{}, float{}) : fn(float{}, bf16{});
  return wide_weight ? fn(bf16{}, float{}) : fn(bf16{}, bf16{});
}

void rms_norm_rows(const NormArgs& args, int64_t begin, int64_t end) {
  with_types(args, [&](auto t, auto w) {
    for (int64_t row = begin; row < end; ++row) rms_norm_row<decltype(t), decltype(w)>(args, row);
  });
  if (args.stream) stream_fence();
}

void layer_norm_rows(const NormArgs& args, int64_t begin, int64_t end) {
  with_types(args, [&](auto t, auto w) {
    for (int64_t row = begin; row < end; ++row) layer_norm_row<decltype(t), decltype(w)>(args, row);
  });
  if (args.stream) stream_fence();
}

}  // namespace
}  // namespace tilewright
