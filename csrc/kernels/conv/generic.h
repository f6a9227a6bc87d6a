// The convolution of some tokens and channels. Include after a Vec.
#pragma once

#include "base/scratch.h"
#include "base/vec/math.h"
#include "base/vec/row.h"
#include "kernels/conv/conv.h"

namespace tilewright {
namespace {

// Tokens computed at once: W + 3 rows are read for four of them, and the taps once.
inline constexpr int kConvTokens = 4;

template <class T, class W, class S>
struct Convolution {
  const ConvArgs& args;
  const ConvPiece& piece;
  const int64_t begin;  // the sequence's first token
  const S* past;        // its state; null: it has none, or one tap needs none

  Convolution(const ConvArgs& args, const ConvPiece& piece)
      : args(args), piece(piece), begin(args.sequences.starts[piece.sequence]), past(nullptr) {
    const int64_t slot = args.sequences.read_slots[piece.sequence];
    if (slot >= 0 && args.width > 1) past = args.states.row<S>(slot);
  }

  const T* input(int64_t token) const { return args.x.row<T>(token); }
  T* output(int64_t token) const { return args.y.row<T>(token); }
  template <class Count>
  Vec tap(int i, int64_t channel, Count count) const {
    return load_some(static_cast<const W*>(args.weight) + i * args.channels + channel, count);
  }
  template <class Count>
  Vec bias(int64_t channel, Count count) const {
    return args.bias ? load_some(static_cast<const W*>(args.bias) + channel, count) : Vec::zero();
  }
  template <class Fn>
  void for_each_channel(Fn fn) const {
    for_each_vec(piece.channel_end - piece.channel_begin,
                 [&](int64_t i, auto count) { fn(piece.channel_begin + i, count); });
  }
  // silu of bf16 results is computed roughly: docs/numerics.md.
  static Vec activate(Vec v) { return silu<kIsBf16<T>>(v); }

  // Computes one token, any of whose inputs may be in the state.
  void one(int64_t token) const {
    for_each_channel([&](int64_t channel, auto count) {
      Vec sum = bias(channel, count);
      for (int i = 0; i < args.width; ++i) {
        const int64_t source = token - args.width + 1 + i - begin;  // among the sequence's tokens
        Vec value = Vec::zero();
        if (source >= 0)
          value = load_some(input(begin + source) + channel, count);
        else if (past)
          value = load_some(past + (source + args.width - 1) * args.channels + channel, count);
        sum = fma(tap(i, channel, count), value, sum);
      }
      store_some(activate(sum), output(token) + channel, count);
    });
  }

  // Computes kConvTokens tokens, all of whose inputs are in x; the taps stay in registers.
  template <int kWidth>
  void several(int64_t token) const {
    for_each_channel([&](int64_t channel, auto count) {
      Vec sums[kConvTokens];
      for (Vec& sum : sums) sum = bias(channel, count);
      Vec taps[kWidth];
      for (int i = 0; i < kWidth; ++i) taps[i] = tap(i, channel, count);
#pragma GCC unroll 8
      for (int row = 0; row < kWidth + kConvTokens - 1; ++row) {
        const Vec value = load_some(input(token - kWidth + 1 + row) + channel, count);
#pragma GCC unroll 4
        for (int t = 0; t < kConvTokens; ++t)
          if (row >= t && row - t < kWidth) sums[t] = fma(taps[row - t], value, sums[t]);
      }
      for (int t = 0; t < kConvTokens; ++t) store_some(activate(sums[t]), output(token + t) + channel, count);
    });
  }

  // Computes kConvTokens tokens for any width: a window of rows slides over the inputs, tap by tap.
  void several_of_any_width(int64_t token) const {
    const int64_t first = token - args.width + 1;
    for_each_channel([&](int64_t channel, auto count) {
      Vec sums[kConvTokens], window[kConvTokens];
      for (Vec& sum : sums) sum = bias(channel, count);
      for (int t = 1; t < kConvTokens; ++t) window[t] = load_some(input(first + t - 1) + channel, count);
#pragma GCC unroll 4
      for (int i = 0; i < args.width; ++i) {
        for (int t = 1; t < kConvTokens; ++t) window[t - 1] = window[t];
        window[kConvTokens - 1] = load_some(input(first + i + kConvTokens - 1) + channel, count);
        const Vec weight = tap(i, channel, count);
        for (int t = 0; t < kConvTokens; ++t) sums[t] = fma(weight, window[t], sums[t]);
      }
      for (int t = 0; t < kConvTokens; ++t) store_some(activate(sums[t]), output(token + t) + channel, count);
    });
  }

  void run() const {
    int64_t token = piece.token_begin;
    for (; token < piece.token_end && token - begin < args.width - 1; ++token) one(token);
    for (; token + kConvTokens <= piece.token_end; token += kConvTokens)
      args.width == 4 ? several<4>(token) : several_of_any_width(token);
    for (; token < piece.token_end; ++token) one(token);
  }

  // A token may overwrite the old state while later tokens still need it: it is copied first.
  void keep() const {
    const int64_t rows = args.width - 1, channels = piece.channel_end - piece.channel_begin;
    if (rows == 0) return;
    const int64_t end = args.sequences.starts[piece.sequence + 1];
    float* old = static_cast<float*>(thread_scratch(rows * channels * sizeof(float)));
    for (int64_t row = 0; row < rows; ++row)
      for_each_vec(channels, [&](int64_t i, auto count) {
        const int64_t place = row * args.channels + piece.channel_begin + i;
        store_some(past ? load_some(past + place, count) : Vec::zero(), old + row * channels + i, count);
      });
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = args.sequences.write_slot(piece.sequence, token);
      if (slot < 0) continue;
      S* state = args.states.row<S>(slot) + piece.channel_begin;
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t source = token - begin - rows + 1 + row;  // among the sequence's tokens
        for_each_vec(channels, [&](int64_t i, auto count) {
          const Vec value = source >= 0 ? load_some(input(begin + source) + piece.channel_begin + i, count)
                                        : load_some(old + (source + rows) * channels + i, count);
          store_some(value, state + row * args.channels + i, count);
        });
      }
    }
  }
};

// Calls fn with the Convolution of args' types.
template <class Fn>
inline void with_convolution(const ConvArgs& args, const ConvPiece& piece, Fn fn) {
  auto with_state = [&](auto t, auto w) {
    using T = decltype(t);
    using W = decltype(w);
    args.states.dtype == DType::bf16 ? fn(Convolution<T, W, bf16>(args, piece))
                                     : fn(Convolution<T, W, float>(args, piece));
  };
  auto with_weight = [&](auto t) { args.weight_dtype == DType::bf16 ? with_state(t, bf16{}) : with_state(t, float{}); };
  args.x.dtype == DType::bf16 ? with_weight(bf16{}) : with_weight(float{});
}

void convolve(const ConvArgs& args, const ConvPiece& piece) {
  with_convolution(args, piece, [](const auto& convolution) { convolution.run(); });
}

void keep(const ConvArgs& args, const ConvPiece& piece) {
  with_convolution(args, piece, [](const auto& convolution) { convolution.keep(); });
}

}  // namespace
}  // namespace tilewright
