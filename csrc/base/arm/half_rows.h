// Rows of bf16 as fp16, which has three more bits and a much smaller range: a row is divided by the power of two that
// brings its largest value to between 1/4 and 1/2, and results are multiplied by it. Values of at least 2^-15 of the
// largest lose nothing. Include after Vec of NEON.
#pragma once

#include "base/half.h"

namespace tilewright {
namespace {

// A power of two by the biased exponent of the largest finite magnitude, from 27 (2^-100) to 251 (2^124), so that it
// and its inverse are normal numbers. From 2^125 on results may be infinite. Infinities and NaN are kept and leave the
// other values as precise: not every query sees every key.
class HalfScale {
 public:
  void include(const bf16* x, int64_t count) {
    uint16x8_t most = vdupq_n_u16(0);
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      const uint16x8_t bits = vandq_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(x + i)), vdupq_n_u16(0x7fff));
      most = vmaxq_u16(most, vandq_u16(bits, vcltq_u16(bits, vdupq_n_u16(kInfinity))));
    }
    int largest = vmaxvq_u16(most);
    for (; i < count; ++i) {
      const int bits = x[i].bits & 0x7fff;
      if (bits < kInfinity && bits > largest) largest = bits;
    }
    const int exponent = largest >> 7 < 251 ? largest >> 7 : 251;
    if (exponent > exponent_) exponent_ = exponent;
  }

  float multiplier() const { return power_of_two(exponent_ + 2); }  // of what is computed
  float inverse() const { return power_of_two(252 - exponent_); }   // of what it is computed with

 private:
  static constexpr uint16_t kInfinity = 0x7f80;

  static float power_of_two(int biased_exponent) {
    const uint32_t bits = static_cast<uint32_t>(biased_exponent) << 23;
    float power;
    __builtin_memcpy(&power, &bits, sizeof(power));
    return power;
  }

  int exponent_ = 27;
};

// Stores x [count] times `factor` as halves [width], a multiple of 4, padded with zeros.
inline void store_halves(const bf16* x, int64_t count, int64_t width, float factor, f16* to) {
  const Vec factors = Vec::set1(factor);
  int64_t i = 0;
  for (; i + Vec::kLanes <= count; i += Vec::kLanes) (Vec::load(x + i) * factors).store(to + i);
  for (; i < width; i += Vec::kLanes) (Vec::load(x + i, count - i < 0 ? 0 : count - i) * factors).store(to + i);
}

}  // namespace
}  // namespace tilewright
