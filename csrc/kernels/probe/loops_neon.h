// The multiply loops of NEON and its extensions. Include after generic.h.
#pragma once

#include <arm_neon.h>

namespace tilewright {
namespace {

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
// By bfmmla: two rows of four times two columns of four.
int64_t multiply_bf16(int64_t rounds, float* sink) {
  uint16x8_t quarters = vdupq_n_u16(0x3e80), eighths = vdupq_n_u16(0x3e00);
  // Hidden from gcc 12, which would encode bf16 constants as fp16.
  asm("" : "+w"(quarters), "+w"(eighths));
  const bfloat16x8_t a = vreinterpretq_bf16_u16(quarters), b = vreinterpretq_bf16_u16(eighths);
  Vec chains[kChains];
#pragma GCC unroll 12
  for (Vec& chain : chains) chain = Vec::zero();
  for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 12
    for (Vec& chain : chains) chain.v = vbfmmlaq_f32(chain.v, a, b);
#pragma GCC unroll 12
  for (int c = 1; c < kChains; ++c) chains[0] = chains[0] + chains[c];
  *sink = reduce_add(chains[0]);
  return rounds * kChains * 16 * 2;
}
#else
inline constexpr MultiplyLoop multiply_bf16 = multiply_fp32;
#endif

#ifdef __ARM_FEATURE_DOTPROD
// By smmla if available, two rows of eight times two columns of eight; else by sdot, four times four.
inline int32x4_t multiply_add_bytes(int32x4_t sum, int8x16_t a, int8x16_t b) {
#ifdef __ARM_FEATURE_MATMUL_INT8
  return vmmlaq_s32(sum, a, b);
#else
  return vdotq_s32(sum, a, b);
#endif
}
#ifdef __ARM_FEATURE_MATMUL_INT8
inline constexpr int kBytesMultiplied = 32;
#else
inline constexpr int kBytesMultiplied = 16;
#endif

int64_t multiply_int8(int64_t rounds, float* sink) {
  const int8x16_t b = vdupq_n_s8(-3);
  int32x4_t chains[kChains];
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) chains[c] = vdupq_n_s32(c);
  // The chain's own bytes are the operand: a product with a constant one would be hoisted out of the loop.
  for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 12
    for (int32x4_t& chain : chains) chain = multiply_add_bytes(chain, vreinterpretq_s8_s32(chain), b);
#pragma GCC unroll 12
  for (int c = 1; c < kChains; ++c) chains[0] = vaddq_s32(chains[0], chains[c]);
  *sink = static_cast<float>(vgetq_lane_s32(chains[0], 0));
  return rounds * kChains * kBytesMultiplied * 2;
}
#else
inline constexpr MultiplyLoop multiply_int8 = multiply_fp32;
#endif

}  // namespace
}  // namespace tilewright
