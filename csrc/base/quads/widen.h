// Converts bytes to bf16, which has all their values, in loops of constant length that compilers vectorise. Include
// after a Vec.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/fp8.h"

namespace tilewright {
namespace {

inline void widen_fp8(const uint8_t* bytes, bf16* wide) {
  for (int i = 0; i < 32; ++i) wide[i] = fp8_to_bf16(bytes[i]);
}

inline void widen_int8(const int8_t* bytes, bf16* wide) {
  for (int i = 0; i < 32; ++i) {
    const float value = static_cast<float>(bytes[i]);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    wide[i] = {static_cast<uint16_t>(bits >> 16)};
  }
}

// Pairs of Vec::kLanes columns apart, as fp32.
inline void load_fp8_pair(const uint8_t* p, Vec& even, Vec& odd) {
  bf16 wide[2 * Vec::kLanes];
  for (int i = 0; i < 2 * Vec::kLanes; ++i) wide[i] = fp8_to_bf16(p[i]);
  load_pair(wide, even, odd);
}
inline void load_int8_pair(const uint8_t* p, Vec& even, Vec& odd) {
  float values[2][Vec::kLanes];
  for (int i = 0; i < Vec::kLanes; ++i)
    for (int parity = 0; parity < 2; ++parity)
      values[parity][i] = static_cast<float>(static_cast<int8_t>(p[2 * i + parity]));
  even = Vec::load(values[0]);
  odd = Vec::load(values[1]);
}

}  // namespace
}  // namespace tilewright
