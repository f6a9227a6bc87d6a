// See compare_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace tilewright {
namespace {

inline uint32_t lanes_at_least(Vec a, Vec b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)));
}

// All ones in the given lanes.
inline __m256 spread_bits(uint32_t lanes) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(lanes)), bit);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bit));
}

inline Vec keep_bits(Vec a, uint32_t lanes) { return {_mm256_and_ps(a.v, spread_bits(lanes))}; }

inline Vec select_bits(Vec a, Vec b, uint32_t lanes) { return {_mm256_blendv_ps(b.v, a.v, spread_bits(lanes))}; }

inline void store_bits(Vec a, uint32_t lanes, float* out) {
  // Lane numbers of the set bits, a byte each, packed to the front.
  const uint64_t spread = _pdep_u64(lanes, 0x0101010101010101ull) * 0xff;
  const uint64_t packed = _pext_u64(0x0706050403020100ull, spread);
  const __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(packed)));
  _mm256_storeu_ps(out, _mm256_permutevar8x32_ps(a.v, order));
}

}  // namespace
}  // namespace tilewright
