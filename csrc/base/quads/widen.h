// Bytes as bf16, which has all their values: loops of known length, which compilers turn into vectors.
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

}  // namespace
}  // namespace tilewright
