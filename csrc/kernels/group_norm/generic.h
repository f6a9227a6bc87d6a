// GroupNorm of a chunk of pixels in terms of Vec; each ISA file includes this after its Vec.
#pragma once

#include "base/scratch.h"
#include "base/vec/activation.h"
#include "base/vec/row.h"
#include "kernels/group_norm/group_norm.h"

namespace tilewright {
namespace {

// Pixels added to the sums of a Vec of channels at a time: the sums are loaded and stored once for all of them.
constexpr int64_t kPixelsAtOnce = 4;

// sums += d and squares += d^2 over `count` pixels, for d the distance from `first`.
template <int64_t kPixels, class T>
inline void add_pixels(const GroupNormArgs& args, const T* first, int64_t row, float* sums, float* squares) {
  const T* x = args.x.row<T>(row);
  for_each_vec(args.channels, [&](int64_t i, auto count) {
    const Vec shift = load_some(first + i, count);
    Vec sum = load_some(sums + i, count), square = load_some(squares + i, count);
#pragma GCC unroll 4
    for (int64_t p = 0; p < kPixels; ++p) {
      const Vec d = load_some(x + p * args.x.stride + i, count) - shift;
      sum = sum + d;
      square = fma(d, d, square);
    }
    store_some(sum, sums + i, count);
    store_some(square, squares + i, count);
  });
}

template <class T>
void stats_of(const GroupNormArgs& args, int64_t row_begin, int64_t row_end, GroupStats* stats) {
  float* sums = static_cast<float*>(thread_scratch(static_cast<size_t>(2 * args.channels) * sizeof(float)));
  float* squares = sums + args.channels;
  for (int64_t i = 0; i < 2 * args.channels; ++i) sums[i] = 0.0f;
  const T* first = args.x.row<T>(row_begin);
  int64_t row = row_begin;
  for (; row + kPixelsAtOnce <= row_end; row += kPixelsAtOnce)
    add_pixels<kPixelsAtOnce>(args, first, row, sums, squares);
  for (; row < row_end; ++row) add_pixels<1>(args, first, row, sums, squares);

  // Each channel's mean and squared distances from it replace its sums.
  const float num_pixels = static_cast<float>(row_end - row_begin);
  const Vec pixels = Vec::set1(num_pixels), share = Vec::set1(1.0f / num_pixels);
  for_each_vec(args.channels, [&](int64_t i, auto count) {
    const Vec sum = load_some(sums + i, count);
    const Vec square = load_some(squares + i, count) - sum * sum * share;
    store_some(max(Vec::zero(), square), squares + i, count);  // 0 first: NaN stays
    store_some(load_some(first + i, count) + sum * share, sums + i, count);
  });
  const int64_t width = args.channels / args.groups;
  for (int64_t group = 0; group < args.groups; ++group) {
    const float *means = sums + group * width, *distances = squares + group * width;
    const float total =
        accumulate(width, [&](Vec sum, int64_t i, auto count) { return sum + load_some(means + i, count); });
    const Vec mean = Vec::set1(total / static_cast<float>(width));
    stats[group].mean = total / static_cast<float>(width);
    stats[group].squares = accumulate(width, [&](Vec sum, int64_t i, auto count) {
      const Vec d = keep_lanes(load_some(means + i, count) - mean, 0, count, Vec::zero());
      return fma(d * d, pixels, sum + load_some(distances + i, count));
    });
  }
}

template <class T>
void apply_to(const GroupNormArgs& args, const float* table, int64_t row_begin, int64_t row_end) {
  const float *means = table, *factors = table + args.channels, *biases = factors + args.channels;
  for (int64_t row = row_begin; row < row_end; ++row) {
    const T* x = args.x.row<T>(row);
    T* y = args.y.row<T>(row);
    with_streaming(args.stream, y, [&](auto streaming) {
      for_each_vec(args.channels, [&](int64_t i, auto count) {
        const Vec v = fma(load_some(x + i, count) - load_some(means + i, count), load_some(factors + i, count),
                          load_some(biases + i, count));
        store_some(apply_activation<kIsBf16<T>>(v, args.activation), y + i, count, streaming);
      });
    });
  }
  if (args.stream) stream_fence();
}

void group_norm_stats(const GroupNormArgs& args, int64_t row_begin, int64_t row_end, GroupStats* stats) {
  args.x.dtype == DType::f32 ? stats_of<float>(args, row_begin, row_end, stats)
                             : stats_of<bf16>(args, row_begin, row_end, stats);
}

void group_norm_apply(const GroupNormArgs& args, const float* table, int64_t row_begin, int64_t row_end) {
  args.x.dtype == DType::f32 ? apply_to<float>(args, table, row_begin, row_end)
                             : apply_to<bf16>(args, table, row_begin, row_end);
}

}  // namespace
}  // namespace tilewright
