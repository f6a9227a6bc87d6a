// Vectors of 8-bit pixels for AVX2, half of bytes_avx512.h, which has the reasoning.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels/image/image.h"
#include "kernels/image/normalizer.h"

namespace tilewright {
namespace {

struct Bytes {
  static constexpr int kCount = 32;
  __m256i v;

  static Bytes load(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
  static Bytes load(const uint8_t* p, int64_t count) {
    if (count >= kCount) return load(p);
    uint8_t buffer[kCount] = {};
    std::memcpy(buffer, p, static_cast<size_t>(count));
    return load(buffer);
  }
  void store(uint8_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  void store(uint8_t* p, int64_t count) const {
    if (count >= kCount) return store(p);
    uint8_t buffer[kCount];
    store(buffer);
    std::memcpy(p, buffer, static_cast<size_t>(count));
  }
  void store_group(uint8_t* p, int group) const {
    const __m128i part = group ? _mm256_extracti128_si256(v, 1) : _mm256_castsi256_si128(v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), part);
  }
};

inline void transpose_groups(Bytes (&rows)[16]) {
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
    Bytes next[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      next[2 * i].v = _mm256_unpacklo_epi8(rows[i].v, rows[i + 8].v);
      next[2 * i + 1].v = _mm256_unpackhi_epi8(rows[i].v, rows[i + 8].v);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = next[i];
  }
}

struct WeightedSum {
  __m256i high[4], low[4];

  WeightedSum() {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      high[i] = _mm256_setzero_si256();
      low[i] = _mm256_set1_epi32(1 << 21);
    }
  }
  void add(Bytes a, Bytes b, const int16_t* pair) {
    int32_t halves[2];
    std::memcpy(halves, pair, sizeof(halves));
    const __m256i weight_high = _mm256_set1_epi32(halves[0]), weight_low = _mm256_set1_epi32(halves[1]);
    const __m256i even_bytes = _mm256_set1_epi16(0xff);
    const __m256i front = _mm256_unpacklo_epi16(a.v, b.v), back = _mm256_unpackhi_epi16(a.v, b.v);
    const __m256i taps[4] = {_mm256_and_si256(front, even_bytes), _mm256_srli_epi16(front, 8),
                             _mm256_and_si256(back, even_bytes), _mm256_srli_epi16(back, 8)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      high[i] = _mm256_add_epi32(high[i], _mm256_madd_epi16(taps[i], weight_high));
      low[i] = _mm256_add_epi32(low[i], _mm256_madd_epi16(taps[i], weight_low));
    }
  }
  Bytes result() const {
    __m256i words[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m256i even = _mm256_srai_epi32(total(2 * i), 22), odd = _mm256_srai_epi32(total(2 * i + 1), 22);
      words[i] = _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa);
    }
    return {_mm256_packus_epi16(words[0], words[1])};
  }
  __m256i total(int i) const { return _mm256_add_epi32(_mm256_slli_epi32(high[i], kWeightLowBits), low[i]); }
};

inline void load_pixels(const uint8_t* p, Vec (&channels)[3]) {
  alignas(16) static constexpr int8_t kFrom[3][2][16] = {
      {{0, 3, 6, 9, 12, 15, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1},
       {-1, -1, -1, -1, -1, -1, 2, 5, -1, -1, -1, -1, -1, -1, -1, -1}},
      {{1, 4, 7, 10, 13, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1},
       {-1, -1, -1, -1, -1, 0, 3, 6, -1, -1, -1, -1, -1, -1, -1, -1}},
      {{2, 5, 8, 11, 14, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1},
       {-1, -1, -1, -1, -1, 1, 4, 7, -1, -1, -1, -1, -1, -1, -1, -1}}};
  const __m128i front = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i back = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 16));
#pragma GCC unroll 3
  for (int c = 0; c < 3; ++c) {
    const auto* from = reinterpret_cast<const __m128i*>(kFrom[c]);
    const __m128i picked =
        _mm_or_si128(_mm_shuffle_epi8(front, _mm_load_si128(from)), _mm_shuffle_epi8(back, _mm_load_si128(from + 1)));
    channels[c].v = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(picked));
  }
}

}  // namespace
}  // namespace tilewright
