// The multiply loops of types that the plain level has no unit for: those of fp32. Include after generic.h; the other
// levels have the same names.
#pragma once

namespace tilewright {
namespace {

inline constexpr MultiplyLoop multiply_bf16 = multiply_fp32;
inline constexpr MultiplyLoop multiply_int8 = multiply_fp32;

}  // namespace
}  // namespace tilewright
