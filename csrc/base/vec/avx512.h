// Vec for AVX-512 (F, BW, DQ, VL): sixteen floats. With -mavx512bf16 the bf16 conversion is one instruction.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "base/bf16.h"

namespace tilewright {
namespace {

struct Vec {
  static constexpr int kLanes = 16;
  static constexpr bool kFmaIsExact = true;
  static constexpr bool kScaleUnderflows = true;
  static constexpr bool kHasFmaByLane = false;
#ifdef __AVX512BF16__
  static constexpr bool kHasBf16Dot = true;
#else
  static constexpr bool kHasBf16Dot = false;
#endif
  __m512 v;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec set1(float x) { return {_mm512_set1_ps(x)}; }

  static __mmask16 lanes_below(int64_t count) {
    if (count <= 0) return 0;
    return count >= kLanes ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
  }

  static Vec widen(__m256i raw) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Vec load(const float* p, int64_t count) { return {_mm512_maskz_loadu_ps(lanes_below(count), p)}; }
  static Vec load(const bf16* p, int64_t count) { return widen(_mm256_maskz_loadu_epi16(lanes_below(count), p)); }

  __m256i to_bf16_bits() const {
#ifdef __AVX512BF16__
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
#else
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
#endif
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(bf16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16_bits()); }
  void stream(float* p) const { _mm512_stream_ps(p, v); }
  void stream(bf16* p) const { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to_bf16_bits()); }
  void store(float* p, int64_t count) const { _mm512_mask_storeu_ps(p, lanes_below(count), v); }
  void store(bf16* p, int64_t count) const { _mm256_mask_storeu_epi16(p, lanes_below(count), to_bf16_bits()); }

  // A key tile (base/kv_tiles.h): 16 tokens of 16 pairs as 16 pairs of 16 tokens, 2 x 2 and 4 x 4 within quarters of
  // registers, then the quarters.
  static void pack_key_tile(const bf16* k, int64_t token_stride, bf16* tile) {
    __m512i from[16], to[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      const __m512i even = _mm512_loadu_si512(k + i * token_stride),
                    odd = _mm512_loadu_si512(k + (i + 1) * token_stride);
      from[i] = _mm512_unpacklo_epi32(even, odd);
      from[i + 1] = _mm512_unpackhi_epi32(even, odd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        to[i + 2 * j] = _mm512_unpacklo_epi64(from[i + j], from[i + j + 2]);
        to[i + 2 * j + 1] = _mm512_unpackhi_epi64(from[i + j], from[i + j + 2]);
      }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i even = _mm512_shuffle_i32x4(to[j], to[j + 4], 0x88);
      const __m512i odd = _mm512_shuffle_i32x4(to[j], to[j + 4], 0xdd);
      const __m512i late_even = _mm512_shuffle_i32x4(to[j + 8], to[j + 12], 0x88);
      const __m512i late_odd = _mm512_shuffle_i32x4(to[j + 8], to[j + 12], 0xdd);
      auto put = [&](int row, __m512i pairs) { _mm512_storeu_si512(tile + row * 32, pairs); };
      put(j, _mm512_shuffle_i32x4(even, late_even, 0x88));
      put(j + 4, _mm512_shuffle_i32x4(odd, late_odd, 0x88));
      put(j + 8, _mm512_shuffle_i32x4(even, late_even, 0xdd));
      put(j + 12, _mm512_shuffle_i32x4(odd, late_odd, 0xdd));
    }
  }
};

#ifdef __AVX512BF16__
// Pairs of bf16, one per lane.
struct PairVec {
  __m512bh v;
  static PairVec load(const bf16* p) { return {reinterpret_cast<__m512bh>(_mm512_loadu_si512(p))}; }
  // The pair at p in every lane.
  static PairVec set1(const bf16* p) {
    int32_t both;
    __builtin_memcpy(&both, p, 4);
    return {reinterpret_cast<__m512bh>(_mm512_set1_epi32(both))};
  }
};

// c + a.even * b.even + a.odd * b.odd.
inline Vec dot(PairVec a, PairVec b, Vec c) { return {_mm512_dpbf16_ps(c.v, a.v, b.v)}; }
#else
struct PairVec {};
#endif

// 12 x 2 tiles are 24 sums of 32 registers.
struct DotTraits {
  static constexpr int kRows = 12, kRowsOf32 = 8;
  static constexpr int kDepthTiles = 0;
  static constexpr int tiles(int) { return 2; }
  static constexpr bool prefetches(int rows, size_t) { return rows <= 4; }
  static constexpr int kPrefetchBytes = 8192;
};

inline void stream_fence() { _mm_sfence(); }

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec scale_by_power_of_2(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }

// A 512-bit division occupies the port for 16 cycles; an estimate good to 2^-14 and one Newton step take four.
// Relative error 2^-14.
inline Vec reciprocal_rough(Vec a) { return {_mm512_rcp14_ps(a.v)}; }
inline Vec reciprocal(Vec a) {
  const __m512 y = _mm512_rcp14_ps(a.v);
  return {_mm512_fmadd_ps(y, _mm512_fnmadd_ps(a.v, y, _mm512_set1_ps(1.0f)), y)};
}

inline float reduce_add(Vec a) { return _mm512_reduce_add_ps(a.v); }
inline float reduce_max(Vec a) { return _mm512_reduce_max_ps(a.v); }

inline Vec keep_lanes(Vec a, int64_t begin, int64_t end, Vec other) {
  const __mmask16 keep = static_cast<__mmask16>(Vec::lanes_below(end) & ~Vec::lanes_below(begin));
  return {_mm512_mask_mov_ps(other.v, keep, a.v)};
}

inline Vec keep_flagged(Vec a, const uint8_t* flags, Vec other) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(flags));
  return {_mm512_mask_mov_ps(other.v, _mm_test_epi8_mask(raw, raw), a.v)};
}

inline void load_pair(const bf16* p, Vec& even, Vec& odd) {
  const __m512i raw = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

inline void load_interleaved(const float* p, Vec& even, Vec& odd) {
  const __m512 low = _mm512_loadu_ps(p), high = _mm512_loadu_ps(p + 16);
  const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  even.v = _mm512_permutex2var_ps(low, evens, high);
  odd.v = _mm512_permutex2var_ps(low, _mm512_add_epi32(evens, _mm512_set1_epi32(1)), high);
}

inline void store_interleaved(float* p, Vec even, Vec odd) {
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  _mm512_storeu_ps(p, _mm512_permutex2var_ps(even.v, first, odd.v));
  _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(even.v, _mm512_add_epi32(first, _mm512_set1_epi32(8)), odd.v));
}

inline void store_interleaved(bf16* p, Vec even, Vec odd) {
  const __m512i low = _mm512_cvtepu16_epi32(even.to_bf16_bits());
  const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd.to_bf16_bits()), 16);
  _mm512_storeu_si512(p, _mm512_or_si512(low, high));
}

}  // namespace
}  // namespace tilewright
