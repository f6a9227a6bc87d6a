// The scalar level has no units for other types: their multiply loops are fp32's. Include after generic.h; the other
// levels define the same names.
#pragma once

namespace tilewright {
namespace {

inline constexpr MultiplyLoop multiply_bf16 = multiply_fp32;
inline constexpr MultiplyLoop multiply_int8 = multiply_fp32;

}  // namespace
}  // namespace tilewright
