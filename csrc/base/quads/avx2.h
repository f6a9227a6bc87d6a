// Products of quads of bytes for AVX2: pairs of products in 16 bits, then pairs of those.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "base/half.h"
#include "base/vec/avx2.h"

#include "base/quads/widen.h"

namespace tilewright {
namespace {

struct IntVec {
  __m256i v;
  static IntVec set1(int32_t x) { return {_mm256_set1_epi32(x)}; }
  void settle() { __asm__("" : "+x"(v)); }
  static IntVec load(const int32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
  void store(int32_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  static IntVec load_bytes(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
  }
  static IntVec load_bytes(const int8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
  }
  IntVec plus(IntVec a, IntVec b) const { return {_mm256_add_epi32(v, _mm256_mullo_epi32(a.v, b.v))}; }
  Vec to_float() const { return {_mm256_cvtepi32_ps(v)}; }
};

struct Steps {  // as for AVX-512
  __m256i v;
  static Steps load(const uint8_t* steps, const int8_t* bases) {
    const __m256i step = IntVec::load_bytes(steps).v, base = IntVec::load_bytes(bases).v;
    const __m256i centre = _mm256_add_epi32(base, _mm256_slli_epi32(step, 3));
    return {_mm256_blend_epi16(step, _mm256_slli_epi32(centre, 16), 0xaa)};
  }
};
inline IntVec add_steps(IntVec total, IntVec sums, int32_t x_sum, const Steps& steps) {
  const __m256i halves = _mm256_blend_epi16(sums.v, _mm256_set1_epi32(x_sum * 65536), 0xaa);
  return {_mm256_add_epi32(total.v, _mm256_madd_epi16(halves, steps.v))};
}

struct RowQuad {
  __m256i v;
  static RowQuad load(const int8_t* p) {
    int32_t quad;
    __builtin_memcpy(&quad, p, 4);
    return {_mm256_set1_epi32(quad)};
  }
};

inline __m256i load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

struct NibbleQuads {
  __m256i v;
  template <bool kUpper>
  static NibbleQuads load(const uint8_t* p) {
    const __m256i bytes = load_bytes(p);
    return {_mm256_and_si256(kUpper ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15))};
  }
};

struct SignedQuads {
  static constexpr int kOffset = 0;
  __m256i v;
  static SignedQuads load(const uint8_t* p) { return {load_bytes(p)}; }
  static SignedQuads look_up(const int8_t* table, const NibbleQuads& codes) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), codes.v)};
  }
};

inline IntVec add_pairs(IntVec sum, __m256i weights, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(weights, x);
  return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
}
inline IntVec dot(IntVec sum, const NibbleQuads& weights, const RowQuad& x) { return add_pairs(sum, weights.v, x.v); }
// The sign is moved to x. Two products of at most 128 * 127 fit 16 bits, where products of bytes up to 255 would not.
inline IntVec dot(IntVec sum, const SignedQuads& weights, const RowQuad& x) {
  return add_pairs(sum, _mm256_abs_epi8(weights.v), _mm256_sign_epi8(x.v, weights.v));
}

inline Vec load_halves(const f16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }

inline void store_bytes(Vec a, int8_t* p) {
  const __m256i ints = _mm256_cvtps_epi32(a.v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(ints), _mm256_extracti128_si256(ints, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

// 4 x 1 tile are 8 sums of 16 registers, beside the weights, their magnitudes and intermediate values.
struct QuadTraits {
  static constexpr int kRows = 4;
  static constexpr int tiles(int rows) { return rows <= 2 ? 2 : 1; }
  static constexpr int kRowsToBytes = 14;
};

}  // namespace
}  // namespace tilewright
