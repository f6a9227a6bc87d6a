// Products of quads of bytes for NEON. With +dotprod four products and their sum are one instruction.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "base/half.h"
#include "base/vec/neon.h"

namespace tilewright {
namespace {

struct IntVec {
  int32x4_t v;
  static IntVec set1(int32_t x) { return {vdupq_n_s32(x)}; }
  void settle() { __asm__("" : "+w"(v)); }
  static IntVec load(const int32_t* p) { return {vld1q_s32(p)}; }
  void store(int32_t* p) const { vst1q_s32(p, v); }
  static IntVec load_bytes(const uint8_t* p) {
    uint32_t four;
    __builtin_memcpy(&four, p, 4);
    const uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
    return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide)))};
  }
  static IntVec load_bytes(const int8_t* p) {
    uint32_t four;
    __builtin_memcpy(&four, p, 4);
    return {vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four)))))};
  }
  IntVec plus(IntVec a, IntVec b) const { return {vmlaq_s32(v, a.v, b.v)}; }
  Vec to_float() const { return {vcvtq_f32_s32(v)}; }
};

struct RowQuad {
  int8x16_t v;
  static RowQuad load(const int8_t* p) {
    int32_t quad;
    __builtin_memcpy(&quad, p, 4);
    return {vreinterpretq_s8_s32(vdupq_n_s32(quad))};
  }
};

struct NibbleQuads {
  int8x16_t v;
  template <bool kUpper>
  static NibbleQuads load(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    return {vreinterpretq_s8_u8(kUpper ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15)))};
  }
};

struct SignedQuads {
  static constexpr int kOffset = 0;
  int8x16_t v;
  static SignedQuads load(const uint8_t* p) { return {vreinterpretq_s8_u8(vld1q_u8(p))}; }
  static SignedQuads look_up(const int8_t* table, const NibbleQuads& codes) {
    return {vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s8(codes.v))};
  }
};

template <class Quads>
inline IntVec dot(IntVec sum, const Quads& weights, const RowQuad& x) {
#ifdef __ARM_FEATURE_DOTPROD
  return {vdotq_s32(sum.v, weights.v, x.v)};
#else
  // Two products of at most 128 * 127 fit 16 bits.
  const int16x8_t low = vmull_s8(vget_low_s8(weights.v), vget_low_s8(x.v));
  const int16x8_t high = vmull_high_s8(weights.v, x.v);
  return {vpadalq_s16(sum.v, vpaddq_s16(low, high))};
#endif
}

inline Vec load_halves(const f16* p) {
  return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))))};
}

// e4m3 in the upper bytes, whatever the lower ones are, as fp16 divided by 256: fp16 has one more exponent bit, with a
// bias larger by 8, so all values, subnormal ones too, are exact. NaN, which loading refuses, is not.
inline float16x8_t fp8_to_halves(uint16x8_t upper) {
  const int16x8_t shifted = vshrq_n_s16(vreinterpretq_s16_u16(upper), 1);  // a sign twice, 7 bits, and what was below
  return vreinterpretq_f16_u16(vandq_u16(vreinterpretq_u16_s16(shifted), vdupq_n_u16(0xbf80)));
}
inline Vec fp8_to_float(float16x4_t halves) { return {vmulq_n_f32(vcvt_f32_f16(halves), 256.0f)}; }

// Stores floats as bf16, which has all their values: their upper halves.
inline void store_upper_halves(float32x4_t low, float32x4_t high, bf16* wide) {
  vst1q_u16(reinterpret_cast<uint16_t*>(wide), vuzp2q_u16(vreinterpretq_u16_f32(low), vreinterpretq_u16_f32(high)));
}
inline void widen_fp8(const uint8_t* bytes, bf16* wide) {
  for (int i = 0; i < 32; i += 8) {
    const float16x8_t halves = fp8_to_halves(vshll_n_u8(vld1_u8(bytes + i), 8));
    store_upper_halves(fp8_to_float(vget_low_f16(halves)).v, fp8_to_float(vget_high_f16(halves)).v, wide + i);
  }
}
inline void widen_int8(const int8_t* bytes, bf16* wide) {
  for (int i = 0; i < 32; i += 8) {
    const int16x8_t words = vmovl_s8(vld1_s8(bytes + i));
    store_upper_halves(vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))), vcvtq_f32_s32(vmovl_high_s16(words)), wide + i);
  }
}

// Pairs of Vec::kLanes columns apart, as fp32.
inline void load_fp8_pair(const uint8_t* p, Vec& even, Vec& odd) {
  const uint16x4_t pairs = vreinterpret_u16_u8(vld1_u8(p));
  const float16x8_t halves = fp8_to_halves(vcombine_u16(vshl_n_u16(pairs, 8), pairs));
  even = fp8_to_float(vget_low_f16(halves));
  odd = fp8_to_float(vget_high_f16(halves));
}
inline void load_int8_pair(const uint8_t* p, Vec& even, Vec& odd) {
  // A conversion that divides by 2^16 reads a number from the upper half of its lane.
  const int32x4_t pairs = vreinterpretq_s32_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(p))));
  even.v = vcvtq_n_f32_s32(vshlq_n_s32(pairs, 16), 16);
  odd.v = vcvtq_f32_s32(vshrq_n_s32(pairs, 16));
}

inline void store_bytes(Vec a, int8_t* p) {
  const int16x4_t words = vqmovn_s32(vcvtnq_s32_f32(a.v));
  const int8x8_t bytes = vqmovn_s16(vcombine_s16(words, words));
  vst1_lane_s32(reinterpret_cast<int32_t*>(p), vreinterpret_s32_s8(bytes), 0);
}

// 6 x 1 tile or 3 x 2 are 24 sums of 32 registers.
struct QuadTraits {
  static constexpr int kRows = 6;
  static constexpr int tiles(int rows) { return rows <= 3 ? 2 : 1; }
  static constexpr int kRowsToBytes = 4;
};

}  // namespace
}  // namespace tilewright

#include "base/quads/steps.h"
