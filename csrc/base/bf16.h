// bf16: the upper half of an fp32, as stored in memory. Conversions round to nearest even and keep NaN.
#pragma once

#include <cstdint>
#include <cstring>

namespace tilewright {

struct bf16 {
  uint16_t bits;
};

// In an anonymous namespace on purpose: these are compiled into files with different ISA flags, and a shared weak
// symbol built for the best level could be linked into the baseline too.
namespace {

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) {
  uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

inline bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return {static_cast<uint16_t>(bits >> 16)};
}

inline void assign(float& target, float value) { target = value; }
inline void assign(bf16& target, float value) { target = to_bf16(value); }

}  // namespace
}  // namespace tilewright
