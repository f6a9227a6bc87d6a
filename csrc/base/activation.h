// Activation functions of kernels, alone or applied to the output of a linear. Formulas: base/vec/math.h.
#pragma once

namespace tilewright {

enum class Activation : int { none, silu, gelu_tanh, gelu_erf, gelu_quick };

inline constexpr int kNumActivations = 5;

inline constexpr const char* name_of(Activation activation) {
  switch (activation) {
    case Activation::none: return "none";
    case Activation::silu: return "silu";
    case Activation::gelu_tanh: return "gelu_tanh";
    case Activation::gelu_erf: return "gelu_erf";
    case Activation::gelu_quick: return "gelu_quick";
  }
  return "?";
}

}  // namespace tilewright
