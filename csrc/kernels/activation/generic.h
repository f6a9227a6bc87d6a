// Spans of rows in terms of Vec; each ISA file includes this after its Vec.
#pragma once

#include "base/vec/activation.h"
#include "base/vec/row.h"
#include "base/vec/sincos.h"
#include "kernels/activation/activation.h"

namespace tilewright {
namespace {

template <Activation kActivation>
using Constant = std::integral_constant<Activation, kActivation>;

// Calls fn with the activation as a constant: one loop per function, no switch inside.
template <class Fn>
inline void with_activation(Activation activation, Fn fn) {
  switch (activation) {
    case Activation::none: return fn(Constant<Activation::none>{});
    case Activation::silu: return fn(Constant<Activation::silu>{});
    case Activation::gelu_tanh: return fn(Constant<Activation::gelu_tanh>{});
    case Activation::gelu_erf: return fn(Constant<Activation::gelu_erf>{});
    case Activation::gelu_quick: return fn(Constant<Activation::gelu_quick>{});
  }
}

template <class Fn>
inline void with_type(DType dtype, Fn fn) {
  return dtype == DType::f32 ? fn(float{}) : fn(bf16{});
}

// Prefetch distance: the hardware's own prefetcher stops at a page of 4 KB.
constexpr int64_t kAheadBytes = 4096;

template <class T, class Count>
inline Vec load_ahead(const T* p, Count count) {
  prefetch(p + kAheadBytes / sizeof(T));
  return load_some(p, count);
}

// y[i...] = fn(i, count) for each Vec of a span.
template <class T, class Fn>
inline void write_span(const ElementwiseArgs& args, T* y, int64_t width, Fn fn) {
  with_streaming(args.stream, y, [&](auto streaming) {
    for_each_vec(width, [&](int64_t i, auto count) { store_some(fn(i, count), y + i, count, streaming); });
  });
  if (args.stream) stream_fence();
}

void activate_span(const ElementwiseArgs& args, int64_t row, int64_t begin, int64_t end) {
  with_type(args.x.dtype, [&](auto t) {
    using T = decltype(t);
    const T* x = args.x.row<T>(row) + begin;
    T* y = args.y.row<T>(row) + begin;
    with_activation(args.activation, [&](auto activation) {
      write_span(args, y, end - begin, [&](int64_t i, auto count) {
        return apply_activation<kIsBf16<T>>(load_ahead(x + i, count), activation);
      });
    });
  });
}

void gate_span(const ElementwiseArgs& args, int64_t row, int64_t begin, int64_t end) {
  with_type(args.x.dtype, [&](auto t) {
    using T = decltype(t);
    const T* x = args.x.row<T>(row) + begin;
    const T* up = x + args.width;
    T* y = args.y.row<T>(row) + begin;
    with_activation(args.activation, [&](auto activation) {
      write_span(args, y, end - begin, [&](int64_t i, auto count) {
        return apply_activation<kIsBf16<T>>(load_ahead(x + i, count), activation) * load_ahead(up + i, count);
      });
    });
  });
}

void add_span(const ElementwiseArgs& args, int64_t row, int64_t begin, int64_t end) {
  with_type(args.x.dtype, [&](auto t) {
    using T = decltype(t);
    const T* x = args.x.row<T>(row) + begin;
    const T* other = args.other.row<T>(row) + begin;
    T* y = args.y.row<T>(row) + begin;
    write_span(args, y, end - begin,
               [&](int64_t i, auto count) { return load_ahead(x + i, count) + load_ahead(other + i, count); });
  });
}

void sigmoid_gate_rows(const SigmoidGateArgs& args, int64_t begin, int64_t end) {
  with_type(args.x.dtype, [&](auto t) {
    with_type(args.gate.dtype, [&](auto g) {
      using T = decltype(t);
      using G = decltype(g);
      constexpr bool kRough = kIsBf16<T>;
      for (int64_t row = begin; row < end; ++row) {
        const int64_t outer = row / args.inner, inner = row % args.inner;
        const T* x = args.x.row<T>(outer, inner);
        const G* gate = args.gate.row<G>(outer, inner);
        T* y = args.y.row<T>(outer, inner);
        if (args.one_per_row) {
          const Vec share = sigmoid<kRough>(Vec::set1(to_float(*gate)));
          for_each_vec(args.width,
                       [&](int64_t i, auto count) { store_some(load_some(x + i, count) * share, y + i, count); });
        } else {
          for_each_vec(args.width, [&](int64_t i, auto count) {
            store_some(load_some(x + i, count) * sigmoid<kRough>(load_some(gate + i, count)), y + i, count);
          });
        }
      }
    });
  });
}

void snake_rows(const SnakeArgs& args, int64_t begin, int64_t end) {
  with_type(args.x.dtype, [&](auto t) {
    using T = decltype(t);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t outer = row / args.inner, inner = row % args.inner;
      const T* x = args.x.row<T>(outer, inner);
      T* y = args.y.row<T>(outer, inner);
      for_each_vec(args.width, [&](int64_t i, auto count) {
        const Vec v = load_some(x + i, count);
        const Vec wave = sin_squared(v * load_some(args.scale + i, count));
        store_some(fma(wave, load_some(args.share + i, count), v), y + i, count);
      });
    }
  });
}

}  // namespace
}  // namespace tilewright
