// fp16 as it is stored: scales of quantised weights. It is only read here; whoever makes scales rounds them.
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

}  // namespace
}  // namespace tilewright
