// Adaptive norms of a range of rows in terms of Vec; each ISA file includes this after its Vec.
#pragma once

#include <cmath>

#include "base/vec/row.h"
#include "kernels/ada_norm/ada_norm.h"

namespace tilewright {
namespace {

// A row of either type, or `otherwise` without one: a perfectly predicted branch beside the load.
struct Operand {
  const void* data;
  DType dtype;
  Vec otherwise;

  Operand(const Rows& rows, int64_t row, float otherwise) : dtype(rows.dtype), otherwise(Vec::set1(otherwise)) {
    data = !rows ? nullptr : dtype == DType::f32 ? static_cast<const void*>(rows.row<float>(row)) : rows.row<bf16>(row);
  }
  Operand(const Modulation& modulation, int64_t row, float otherwise)
      : Operand(modulation.rows, row / modulation.share, otherwise) {}

  template <class Count>
  Vec load(int64_t i, Count count) const {
    if (!data) return otherwise;
    return dtype == DType::f32 ? load_some(static_cast<const float*>(data) + i, count)
                               : load_some(static_cast<const bf16*>(data) + i, count);
  }
};

// residual += gate * x.
template <class T>
inline void add_gated(const AdaNormArgs& args, int64_t row) {
  const T* x = args.x.row<T>(row);
  T* residual = args.residual.row<T>(row);
  const Operand gate(args.gate, row, 1.0f);
  for_each_vec(args.width, [&](int64_t i, auto count) {
    store_some(fma(gate.load(i, count), load_some(x + i, count), load_some(residual + i, count)), residual + i, count);
  });
}

// Mean and scale of a row: (x - mean) * scale is its norm.
struct RowNorm {
  Vec mean, scale;
};

template <class T>
inline RowNorm norm_of(const AdaNormArgs& args, const T* x) {
  const float width = static_cast<float>(args.width);
  Vec mean = Vec::zero();
  float squares;
  if (args.is_rms) {
    squares = sum_of_squares(x, args.width);
  } else {
    mean = Vec::set1(
        accumulate(args.width, [&](Vec sum, int64_t i, auto count) { return sum + load_some(x + i, count); }) / width);
    // A second pass, as in layer_norm: none of the cancellation of mean(x^2) - mean(x)^2.
    squares = accumulate(args.width, [&](Vec sum, int64_t i, auto count) {
      const Vec d = keep_lanes(load_some(x + i, count) - mean, 0, count, Vec::zero());
      return fma(d, d, sum);
    });
  }
  return {mean, Vec::set1(1.0f / std::sqrt(squares / width + args.eps))};
}

template <class T>
void ada_norm_row(const AdaNormArgs& args, int64_t row) {
  if (args.residual) add_gated<T>(args, row);
  const Rows& source = args.residual ? args.residual : args.x;
  const T *x = source.row<T>(row), *next = source.row<T>(row + 1);
  T* y = args.y.row<T>(row);
  const Operand scale(args.scale, row, 0.0f), shift(args.shift, row, 0.0f);
  const Operand weight(args.weight, 0, 1.0f), bias(args.bias, 0, 0.0f);
  const RowNorm norm = norm_of(args, x);
  const Vec constant = Vec::set1(args.constant);
  with_streaming(args.stream, y, [&](auto streaming) {
    for_each_vec(args.width, [&](int64_t i, auto count) {
      Vec v = (load_some(x + i, count) - norm.mean) * norm.scale;
      v = fma(v, weight.load(i, count), bias.load(i, count));
      v = fma(v, constant + scale.load(i, count), shift.load(i, count));
      prefetch(next + i);
      store_some(v, y + i, count, streaming);
    });
  });
}

template <class T>
void gated_add_row(const AdaNormArgs& args, int64_t row) {
  const T *x = args.x.row<T>(row), *residual = args.residual.row<T>(row);
  T* y = args.y.row<T>(row);
  const Operand gate(args.gate, row, 1.0f);
  with_streaming(args.stream, y, [&](auto streaming) {
    for_each_vec(args.width, [&](int64_t i, auto count) {
      store_some(fma(gate.load(i, count), load_some(x + i, count), load_some(residual + i, count)), y + i, count,
                 streaming);
    });
  });
}

void ada_norm_rows(const AdaNormArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    args.x.dtype == DType::f32 ? ada_norm_row<float>(args, row) : ada_norm_row<bf16>(args, row);
  if (args.stream) stream_fence();
}

void gated_add_rows(const AdaNormArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    args.x.dtype == DType::f32 ? gated_add_row<float>(args, row) : gated_add_row<bf16>(args, row);
  if (args.stream) stream_fence();
}

}  // namespace
}  // namespace tilewright
