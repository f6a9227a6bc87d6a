// Vec for NEON: four floats. With +bf16 conversions to bf16 and products of bf16 pairs are single instructions.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "base/bf16.h"
#include "base/half.h"

namespace tilewright {
namespace {

struct Vec {
  static constexpr int kLanes = 4;
  static constexpr bool kFmaIsExact = true;
  static constexpr bool kScaleUnderflows = false;
  static constexpr bool kHasFmaByLane = true;
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
  static constexpr bool kHasBf16Dot = true;
#else
  static constexpr bool kHasBf16Dot = false;
#endif
  float32x4_t v;

  static Vec zero() { return {vdupq_n_f32(0.0f)}; }
  static Vec set1(float x) { return {vdupq_n_f32(x)}; }

  static uint16x4_t raw(const bf16* p) { return vld1_u16(reinterpret_cast<const uint16_t*>(p)); }
  static Vec load(const float* p) { return {vld1q_f32(p)}; }
  static Vec load(const bf16* p) { return {vreinterpretq_f32_u32(vshll_n_u16(raw(p), 16))}; }
  template <class T>
  static Vec load(const T* p, int64_t count) {
    if (count >= kLanes) return load(p);
    T buffer[kLanes] = {};
    for (int i = 0; i < count; ++i) buffer[i] = p[i];
    return load(buffer);
  }

  // Four bf16, round to nearest even, NaN stays NaN.
  uint16x4_t to_bf16_bits() const {
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    return vreinterpret_u16_bf16(vcvt_bf16_f32(v));
#else
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, vdupq_n_u32(0x7fc00000)), 16);
#endif
  }
  void store(float* p) const { vst1q_f32(p, v); }
  void store(bf16* p) const { vst1_u16(reinterpret_cast<uint16_t*>(p), to_bf16_bits()); }
  void store(f16* p) const { vst1_u16(reinterpret_cast<uint16_t*>(p), vreinterpret_u16_f16(vcvt_f16_f32(v))); }
  // These cores detect by themselves that whole lines are written, and stop reading them first.
  template <class T>
  void stream(T* p) const {
    store(p);
  }
  template <class T>
  void store(T* p, int64_t count) const {
    if (count >= kLanes) return store(p);
    T buffer[kLanes];
    store(buffer);
    for (int i = 0; i < count; ++i) p[i] = buffer[i];
  }
};

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
// Pairs of bf16, one per lane.
struct PairVec {
  bfloat16x8_t v;
  static PairVec load(const bf16* p) {
    return {vreinterpretq_bf16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)))};
  }
};

// c + a.even * b.even + a.odd * b.odd with the pair of lane kLane of b.
template <int kLane>
inline Vec dot_lane(PairVec a, PairVec b, Vec c) {
  return {vbfdotq_laneq_f32(c.v, a.v, b.v, kLane)};
}
#else
struct PairVec {};
#endif

// Four rows by one tile are 16 sums, twice what two pipes with a latency of four need, and leave half of the registers
// for the operands; few rows use two tiles to have as many.
struct DotTraits {
  static constexpr int kRows = 4, kRowsOf32 = 4;
  static constexpr int kDepthTiles = 8;  // 2 columns of 8 fp32 tiles are 32 KB, half of the L1 cache
  static constexpr int tiles(int rows) { return rows <= 2 ? 2 : 1; }
  // Four rows of fp32 tiles are one of many such blocks, whose tiles are in the cache.
  static constexpr bool prefetches(int rows, size_t element_bytes) { return rows <= (element_bytes == 2 ? 4 : 2); }
  static constexpr int kPrefetchBytes = 2048;
};

inline void stream_fence() {}

inline Vec operator+(Vec a, Vec b) { return {vaddq_f32(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {vsubq_f32(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {vmulq_f32(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {vdivq_f32(a.v, b.v)}; }
// Returns the second operand if either is NaN, which FMAX does not.
inline Vec max(Vec a, Vec b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
inline Vec round(Vec a) { return {vrndnq_f32(a.v)}; }

// a * (lane kLane of b) + c: a broadcast would be another instruction on the pipes that multiply. In assembly, because
// gcc 12 copies sums between registers around its own form of it: 18 moves for 64 of these.
template <int kLane>
inline Vec fma_lane(Vec a, Vec b, Vec c) {
  __asm__("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(c.v) : "w"(a.v), "w"(b.v), "i"(kLane));
  return c;
}

inline Vec scale_by_power_of_2(Vec a, Vec n) {
  const int32x4_t biased = vaddq_s32(vcvtnq_s32_f32(n.v), vdupq_n_s32(127));
  return {vmulq_f32(a.v, vreinterpretq_f32_s32(vshlq_n_s32(biased, 23)))};
}

// A division occupies its pipe for some 7 cycles; an estimate good to 2^-8 and a Newton step for 16 bits, or two for
// all, take less. Relative error 2^-16.
inline Vec reciprocal_rough(Vec a) {
  const float32x4_t y = vrecpeq_f32(a.v);
  return {vmulq_f32(y, vrecpsq_f32(a.v, y))};
}
inline Vec reciprocal(Vec a) {
  const float32x4_t y = reciprocal_rough(a).v;
  return {vmulq_f32(y, vrecpsq_f32(a.v, y))};
}

inline float reduce_add(Vec a) { return vaddvq_f32(a.v); }
inline float reduce_max(Vec a) { return vmaxvq_f32(a.v); }

inline Vec keep_lanes(Vec a, int64_t begin, int64_t end, Vec other) {
  constexpr int32x4_t kLane = {0, 1, 2, 3};
  const auto at_most_lanes = [](int64_t n) {
    return static_cast<int32_t>(n < 0 ? 0 : n < Vec::kLanes ? n : Vec::kLanes);
  };
  const uint32x4_t from = vcgeq_s32(kLane, vdupq_n_s32(at_most_lanes(begin)));
  const uint32x4_t before = vcltq_s32(kLane, vdupq_n_s32(at_most_lanes(end)));
  return {vbslq_f32(vandq_u32(from, before), a.v, other.v)};
}

inline Vec keep_flagged(Vec a, const uint8_t* flags, Vec other) {
  uint32_t four;
  __builtin_memcpy(&four, flags, sizeof(four));
  const uint32x4_t wide = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
  return {vbslq_f32(vtstq_u32(wide, wide), a.v, other.v)};
}

inline void load_pair(const bf16* p, Vec& even, Vec& odd) {
  // Both by a transposition with zeros: shifts have only one pipe.
  const uint16x8_t pairs = vld1q_u16(reinterpret_cast<const uint16_t*>(p));
  even.v = vreinterpretq_f32_u16(vtrn1q_u16(vdupq_n_u16(0), pairs));
  odd.v = vreinterpretq_f32_u16(vtrn2q_u16(vdupq_n_u16(0), pairs));
}

inline void load_interleaved(const float* p, Vec& even, Vec& odd) {
  const float32x4_t low = vld1q_f32(p), high = vld1q_f32(p + 4);
  even.v = vuzp1q_f32(low, high);
  odd.v = vuzp2q_f32(low, high);
}

inline void store_interleaved(float* p, Vec even, Vec odd) {
  vst1q_f32(p, vzip1q_f32(even.v, odd.v));
  vst1q_f32(p + 4, vzip2q_f32(even.v, odd.v));
}

inline void store_interleaved(bf16* p, Vec even, Vec odd) {
  const uint16x4_t a = even.to_bf16_bits(), b = odd.to_bf16_bits();
  vst1q_u16(reinterpret_cast<uint16_t*>(p), vcombine_u16(vzip1_u16(a, b), vzip2_u16(a, b)));
}

}  // namespace
}  // namespace tilewright

#include "base/arm/row_product.h"
