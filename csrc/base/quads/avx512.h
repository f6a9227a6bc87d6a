// Products of quads of bytes for AVX-512. With -mavx512vnni four products and their sum are one instruction, of an
// unsigned and a signed byte.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "base/half.h"
#include "base/vec/avx512.h"

namespace tilewright {
namespace {

struct IntVec {
  __m512i v;
  static IntVec set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
  void settle() { __asm__("" : "+v"(v)); }
  static IntVec load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
  void store(int32_t* p) const { _mm512_storeu_si512(p, v); }
  static IntVec load_bytes(const uint8_t* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  static IntVec load_bytes(const int8_t* p) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
  IntVec plus(IntVec a, IntVec b) const { return {_mm512_add_epi32(v, _mm512_mullo_epi32(a.v, b.v))}; }
  Vec to_float() const { return {_mm512_cvtepi32_ps(v)}; }
};

// Step and base + 8 step of each column, as halves of a word: a group's sums, of quants minus 8, and the sum of x fit
// 16 bits, so that both products and their sum are one instruction.
struct Steps {
  __m512i v;
  static Steps load(const uint8_t* steps, const int8_t* bases) {
    const __m512i step = IntVec::load_bytes(steps).v, base = IntVec::load_bytes(bases).v;
    const __m512i centre = _mm512_add_epi32(base, _mm512_slli_epi32(step, 3));
    return {_mm512_mask_blend_epi16(0xaaaaaaaa, step, _mm512_slli_epi32(centre, 16))};
  }
};
inline IntVec add_steps(IntVec total, IntVec sums, int32_t x_sum, const Steps& steps) {
  const __m512i halves = _mm512_mask_blend_epi16(0xaaaaaaaa, sums.v, _mm512_set1_epi32(x_sum * 65536));
  return {_mm512_add_epi32(total.v, _mm512_madd_epi16(halves, steps.v))};
}

struct RowQuad {
  __m512i v;
  static RowQuad load(const int8_t* p) {
    int32_t quad;
    __builtin_memcpy(&quad, p, 4);
    return {_mm512_set1_epi32(quad)};
  }
};

struct NibbleQuads {
  __m512i v;
  template <bool kUpper>
  static NibbleQuads load(const uint8_t* p) {
    const __m512i bytes = _mm512_loadu_si512(p);
    return {_mm512_and_si512(kUpper ? _mm512_srli_epi16(bytes, 4) : bytes, _mm512_set1_epi8(15))};
  }
};

// Values of codes: those of a table, each with some bits flipped.
inline __m512i look_up(const int8_t* table, uint8_t turned, const NibbleQuads& codes) {
  const __m128i values =
      _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)), _mm_set1_epi8(static_cast<char>(turned)));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), codes.v);
}

#ifdef __AVX512VNNI__
struct SignedQuads {
  static constexpr int kOffset = 128;
  __m512i v;
  static SignedQuads look_up(const int8_t* table, const NibbleQuads& codes) {
    return {tilewright::look_up(table, 0x80, codes)};
  }
  static SignedQuads load(const uint8_t* p) {
    return {_mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(static_cast<char>(0x80)))};
  }
};

template <class Quads>
inline IntVec dot(IntVec sum, const Quads& weights, const RowQuad& x) {
  return {_mm512_dpbusd_epi32(sum.v, weights.v, x.v)};
}
#else
// The sign is moved to x. Two products of at most 128 * 127 fit 16 bits.
struct SignedQuads {
  static constexpr int kOffset = 0;
  __m512i magnitude;
  __mmask64 is_negative;
  static SignedQuads of(__m512i bytes) { return {_mm512_abs_epi8(bytes), _mm512_movepi8_mask(bytes)}; }
  static SignedQuads load(const uint8_t* p) { return of(_mm512_loadu_si512(p)); }
  static SignedQuads look_up(const int8_t* table, const NibbleQuads& codes) {
    return of(tilewright::look_up(table, 0, codes));
  }
};

inline IntVec add_pairs(IntVec sum, __m512i weights, __m512i x) {
  const __m512i pairs = _mm512_maddubs_epi16(weights, x);
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
inline IntVec dot(IntVec sum, const NibbleQuads& weights, const RowQuad& x) { return add_pairs(sum, weights.v, x.v); }
inline IntVec dot(IntVec sum, const SignedQuads& weights, const RowQuad& x) {
  const __m512i zero = _mm512_setzero_si512();
  return add_pairs(sum, weights.magnitude, _mm512_mask_sub_epi8(x.v, weights.is_negative, zero, x.v));
}
#endif

// Converts 32 bytes to bf16. fp8's exponent gets bf16's bias; values with an exponent of zero, subnormal in fp8, are
// looked up.
inline __m512i fp8_as_bf16(const uint8_t* bytes) {
  alignas(64) static constexpr uint16_t kSmall[32] = {0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x7f)), 4),
                                          _mm512_set1_epi16(120 << 7));
  const __mmask32 is_small = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
  const __m512i magnitude = _mm512_mask_permutexvar_epi16(normal, is_small, codes, _mm512_load_si512(kSmall));
  const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x80)), 8);
  return _mm512_or_si512(magnitude, sign);
}
inline void widen_fp8(const uint8_t* bytes, bf16* wide) { _mm512_storeu_si512(wide, fp8_as_bf16(bytes)); }
inline void widen_int8(const int8_t* bytes, bf16* wide) {
  for (int i = 0; i < 32; i += 16) {
    const __m512i whole = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + i)));
    const __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(whole)), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(wide + i), _mm512_cvtepi32_epi16(bits));
  }
}

// Pairs of 16 columns apart, as fp32.
inline void load_fp8_pair(const uint8_t* p, Vec& even, Vec& odd) {
  const __m512i pairs = fp8_as_bf16(p);
  even = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
  odd = {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline void load_int8_pair(const uint8_t* p, Vec& even, Vec& odd) {
  const __m512i pairs = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  even = {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 16))};
  odd = {_mm512_cvtepi32_ps(_mm512_srai_epi32(pairs, 16))};
}

inline Vec load_halves(const f16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

inline void store_bytes(Vec a, int8_t* p) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

// 12 x 2 tiles are 24 sums of 32 registers.
struct QuadTraits {
  static constexpr int kRows = 12;
  static constexpr int tiles(int) { return 2; }
  static constexpr int kRowsToBytes = 14;
};

}  // namespace
}  // namespace tilewright
