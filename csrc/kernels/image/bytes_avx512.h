// Vectors of 8-bit pixels for AVX-512 (BW, VL).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels/image/image.h"
#include "kernels/image/normalizer.h"

namespace tilewright {
namespace {

struct Bytes {
  static constexpr int kCount = 64;
  __m512i v;

  static __mmask64 first(int64_t count) { return count >= kCount ? ~0ull : (1ull << count) - 1; }
  static Bytes load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
  static Bytes load(const uint8_t* p, int64_t count) { return {_mm512_maskz_loadu_epi8(first(count), p)}; }
  void store(uint8_t* p) const { _mm512_storeu_si512(p, v); }
  void store(uint8_t* p, int64_t count) const { _mm512_mask_storeu_epi8(p, first(count), v); }
  void store_group(uint8_t* p, int group) const {
    __m128i part;
    switch (group) {
      case 0: part = _mm512_castsi512_si128(v); break;
      case 1: part = _mm512_extracti32x4_epi32(v, 1); break;
      case 2: part = _mm512_extracti32x4_epi32(v, 2); break;
      default: part = _mm512_extracti32x4_epi32(v, 3);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), part);
  }
};

// Interleaving rows i and i + 8 four times is a 16 x 16 transpose within each 128-bit lane.
inline void transpose_groups(Bytes (&rows)[16]) {
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
    Bytes next[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      next[2 * i].v = _mm512_unpacklo_epi8(rows[i].v, rows[i + 8].v);
      next[2 * i + 1].v = _mm512_unpackhi_epi8(rows[i].v, rows[i + 8].v);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = next[i];
  }
}

// A 23-bit weight does not fit vpmaddwd, but its two halves do: 2 x 4 multiply-adds add two taps of 64 bytes, where
// vpmulld would need 8 of twice the cost.
struct WeightedSum {
  __m512i high[4], low[4];

  WeightedSum() {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      high[i] = _mm512_setzero_si512();
      low[i] = _mm512_set1_epi32(1 << 21);
    }
  }
  void add(Bytes a, Bytes b, const int16_t* pair) {
    int32_t halves[2];
    std::memcpy(halves, pair, sizeof(halves));
    const __m512i weight_high = _mm512_set1_epi32(halves[0]), weight_low = _mm512_set1_epi32(halves[1]);
    // Words of a and b alternate: their even bytes are the pairs (a, b) of even positions, their odd bytes of odd ones.
    const __m512i even_bytes = _mm512_set1_epi16(0xff);
    const __m512i front = _mm512_unpacklo_epi16(a.v, b.v), back = _mm512_unpackhi_epi16(a.v, b.v);
    const __m512i taps[4] = {_mm512_and_si512(front, even_bytes), _mm512_srli_epi16(front, 8),
                             _mm512_and_si512(back, even_bytes), _mm512_srli_epi16(back, 8)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      high[i] = _mm512_add_epi32(high[i], _mm512_madd_epi16(taps[i], weight_high));
      low[i] = _mm512_add_epi32(low[i], _mm512_madd_epi16(taps[i], weight_low));
    }
  }
  Bytes result() const {
    __m512i words[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m512i even = _mm512_srai_epi32(total(2 * i), 22), odd = _mm512_srai_epi32(total(2 * i + 1), 22);
      words[i] = _mm512_mask_blend_epi16(0xaaaaaaaau, even, _mm512_slli_epi32(odd, 16));
    }
    return {_mm512_packus_epi16(words[0], words[1])};
  }
  __m512i total(int i) const { return _mm512_add_epi32(_mm512_slli_epi32(high[i], kWeightLowBits), low[i]); }
};

// Returns byte 3 i + channel of three registers, for i in 0..15.
inline __m128i every_third(const __m128i (&raw)[3], int channel) {
  alignas(16) static constexpr int8_t kFrom[3][3][16] = {
      {{0, 3, 6, 9, 12, 15, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1},
       {-1, -1, -1, -1, -1, -1, 2, 5, 8, 11, 14, -1, -1, -1, -1, -1},
       {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 1, 4, 7, 10, 13}},
      {{1, 4, 7, 10, 13, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1},
       {-1, -1, -1, -1, -1, 0, 3, 6, 9, 12, 15, -1, -1, -1, -1, -1},
       {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 2, 5, 8, 11, 14}},
      {{2, 5, 8, 11, 14, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1},
       {-1, -1, -1, -1, -1, 1, 4, 7, 10, 13, -1, -1, -1, -1, -1, -1},
       {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 3, 6, 9, 12, 15}}};
  __m128i picked = _mm_setzero_si128();
#pragma GCC unroll 3
  for (int i = 0; i < 3; ++i) {
    const __m128i from = _mm_load_si128(reinterpret_cast<const __m128i*>(kFrom[channel][i]));
    picked = _mm_or_si128(picked, _mm_shuffle_epi8(raw[i], from));
  }
  return picked;
}

inline void load_pixels(const uint8_t* p, Vec (&channels)[3]) {
  const auto* blocks = reinterpret_cast<const __m128i*>(p);
  const __m128i raw[3] = {_mm_loadu_si128(blocks), _mm_loadu_si128(blocks + 1), _mm_loadu_si128(blocks + 2)};
#pragma GCC unroll 3
  for (int c = 0; c < 3; ++c) channels[c].v = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(every_third(raw, c)));
}

}  // namespace
}  // namespace tilewright
