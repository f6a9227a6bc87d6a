// Vec for AVX2 + FMA: eight floats.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "base/bf16.h"

namespace tilewright {
namespace {

struct Vec {
  static constexpr int kLanes = 8;
  static constexpr bool kFmaIsExact = true;
  static constexpr bool kScaleUnderflows = false;
  static constexpr bool kHasFmaByLane = false;
  static constexpr bool kHasBf16Dot = false;
  __m256 v;

  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec set1(float x) { return {_mm256_set1_ps(x)}; }

  static __m256i lanes_below(int64_t count) {
    const int n = count < kLanes ? static_cast<int>(count) : kLanes;
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load(const bf16* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16))};
  }
  static Vec load(const float* p, int64_t count) { return {_mm256_maskload_ps(p, lanes_below(count))}; }
  static Vec load(const bf16* p, int64_t count) {
    if (count >= kLanes) return load(p);
    bf16 buffer[kLanes] = {};
    for (int i = 0; i < count; ++i) buffer[i] = p[i];
    return load(buffer);
  }

  // Eight bf16, round to nearest even, NaN stays NaN.
  __m128i to_bf16_bits() const {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(nan));
    const __m256i high = _mm256_srli_epi32(rounded, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(bf16* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16_bits()); }
  void stream(float* p) const { _mm256_stream_ps(p, v); }
  void stream(bf16* p) const { _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_bf16_bits()); }
  void store(float* p, int64_t count) const { _mm256_maskstore_ps(p, lanes_below(count), v); }
  void store(bf16* p, int64_t count) const {
    if (count >= kLanes) return store(p);
    bf16 buffer[kLanes];
    store(buffer);
    for (int i = 0; i < count; ++i) p[i] = buffer[i];
  }
};

struct PairVec {};

// 6 x 1 tile or 3 x 2 are 12 sums of 16 registers. A chain of dependent additions is slow: few rows take two tiles.
struct DotTraits {
  static constexpr int kRows = 6, kRowsOf32 = 4;
  static constexpr int kDepthTiles = 0;
  static constexpr int tiles(int rows) { return rows <= 3 ? 2 : 1; }
  static constexpr bool prefetches(int rows, size_t) { return rows <= 4; }
  static constexpr int kPrefetchBytes = 8192;
};

inline void stream_fence() { _mm_sfence(); }

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

inline Vec scale_by_power_of_2(Vec a, Vec n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)))};
}

inline Vec reciprocal(Vec a) { return Vec::set1(1.0f) / a; }
inline Vec reciprocal_rough(Vec a) { return reciprocal(a); }

inline float reduce_add(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float reduce_max(Vec a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

inline Vec keep_lanes(Vec a, int64_t begin, int64_t end, Vec other) {
  const __m256i below_end = Vec::lanes_below(end < 0 ? 0 : end);
  const __m256i below_begin = Vec::lanes_below(begin < 0 ? 0 : begin);
  const __m256i keep = _mm256_andnot_si256(below_begin, below_end);
  return {_mm256_blendv_ps(other.v, a.v, _mm256_castsi256_ps(keep))};
}

inline Vec keep_flagged(Vec a, const uint8_t* flags, Vec other) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(flags)));
  const __m256i drop = _mm256_cmpeq_epi32(wide, _mm256_setzero_si256());
  return {_mm256_blendv_ps(a.v, other.v, _mm256_castsi256_ps(drop))};
}

inline void load_pair(const bf16* p, Vec& even, Vec& odd) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even.v = _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16));
  odd.v = _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

inline void load_interleaved(const float* p, Vec& even, Vec& odd) {
  const __m256 low = _mm256_loadu_ps(p), high = _mm256_loadu_ps(p + 8);
  const __m256 first = _mm256_permute2f128_ps(low, high, 0x20), second = _mm256_permute2f128_ps(low, high, 0x31);
  even.v = _mm256_shuffle_ps(first, second, 0x88);
  odd.v = _mm256_shuffle_ps(first, second, 0xdd);
}

inline void store_interleaved(float* p, Vec even, Vec odd) {
  const __m256 low = _mm256_unpacklo_ps(even.v, odd.v), high = _mm256_unpackhi_ps(even.v, odd.v);
  _mm256_storeu_ps(p, _mm256_permute2f128_ps(low, high, 0x20));
  _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(low, high, 0x31));
}

inline void store_interleaved(bf16* p, Vec even, Vec odd) {
  const __m128i a = even.to_bf16_bits(), b = odd.to_bf16_bits();
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_unpacklo_epi16(a, b));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm_unpackhi_epi16(a, b));
}

}  // namespace
}  // namespace tilewright
