// e4m3: a sign, four bits of exponent with a bias of 7, three of the fraction; no infinities. bf16 has all its values.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/bf16.h"

namespace tilewright {
namespace {

// Bits of |value|, except for NaN, which loading refuses. Branchless, so that the compiler vectorises loops: an
// exponent of zero is 2^-6 (1 + f) - 2^-6, so that no intermediate value is subnormal.
inline bf16 fp8_to_bf16(uint8_t byte) {
  constexpr uint32_t kBias = 120u << 23;  // 127 - 7
  const uint32_t magnitude = byte & 0x7fu;
  const bool is_small = magnitude < 8;
  const uint32_t bits = (magnitude << 20) + kBias + (is_small ? 1u << 23 : 0u);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  value -= is_small ? 0.015625f : 0.0f;
  uint32_t result;
  std::memcpy(&result, &value, sizeof(result));
  return {static_cast<uint16_t>(result >> 16 | (byte & 0x80u) << 8)};
}

}  // namespace
}  // namespace tilewright
