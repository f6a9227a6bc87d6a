// An activation of each lane. Include after a Vec.
#pragma once

#include "base/activation.h"
#include "base/vec/math.h"

namespace tilewright {
namespace {

// With a constant activation the switch folds away: hot loops pass a template argument. kRough: for results that are
// rounded to bf16 next.
template <bool kRough = false>
inline Vec apply_activation(Vec x, Activation activation) {
  switch (activation) {
    case Activation::none: return x;
    case Activation::silu: return silu<kRough>(x);
    case Activation::gelu_tanh: return gelu_tanh<kRough>(x);
    case Activation::gelu_erf: return gelu_erf(x);
    case Activation::gelu_quick: return gelu_quick<kRough>(x);
  }
  return x;
}

}  // namespace
}  // namespace tilewright
