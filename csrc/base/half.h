// fp16 as stored: scales of quantised weights, and weights if the ISA level multiplies in fp16.
#pragma once

#include <cstdint>
#include <cstring>

namespace tilewright {

struct f16 {
  uint16_t bits;
};

namespace {

inline float to_float(f16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = value.bits >> 10 & 0x1fu, mantissa = value.bits & 0x3ffu;
  if (exponent == 0) {  // zero or a multiple of 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0xffu : exponent + 112u) << 23 | mantissa << 13;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// Rounds to nearest, ties to even; too large values become infinity.
inline f16 to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};   // NaN
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // from 65,520 on
  if (magnitude < 0x38800000u) {  // below 2^-14: multiples of 2^-24, which is the last bit of 0.5 in fp32
    float small;
    std::memcpy(&small, &magnitude, sizeof(small));
    small += 0.5f;
    std::memcpy(&bits, &small, sizeof(bits));
    return {static_cast<uint16_t>(sign | (bits - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return {static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13)};
}

}  // namespace
}  // namespace tilewright
