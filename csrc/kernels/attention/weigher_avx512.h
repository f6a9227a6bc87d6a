// Softmax weights in bf16 for AVX-512 with VBMI and BF16. Include after softmax.h.
#pragma once

#include "kernels/attention/softmax.h"

namespace tilewright {
namespace {

// bf16 weights without an exponential. The bits of a bf16 are its logarithm, 128 (log2 + 127), except for a bulge of up
// to 11 between powers of two: so 128 times the exponent, rounded to an integer, minus the bulge from a table of 64, is
// the weight. 10 instructions for 32 keys instead of 22, and the softmax was half of attention's time. The exponent is
// rounded to 1/128 and the bulge to an integer: the mean error of a weight is 1.5 times that of rounding to bf16 alone.
// The summed weights are those that multiply the values.
template <>
class Weigher<bf16> {
 public:
  Weigher(float scale, float maximum)
      : scale_(_mm512_set1_ps(128 * scale)),
        offset_(_mm512_set1_ps(127 * 128 - 128 * maximum)),
        total_(_mm512_setzero_ps()) {}

  void weigh(const float* scores, bf16* weights) {
    // This conversion raises no CPU flag for NaN and -inf: hides_nan reads the one that a maximum raises.
    auto scaled = [&](const float* at) {
      return _mm512_cvt_roundps_epi32(_mm512_fmadd_ps(_mm512_loadu_ps(at), scale_, offset_),
                                      _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    };
    // Packing works in lanes of 128 bits: quarters of both halves alternate, and the permutation reorders them. Values
    // below the smallest power of two, also -inf, saturate to 0.
    const __m512i in_turn = _mm512_packus_epi32(scaled(scores), scaled(scores + 16));
    const __m512i straight = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), in_turn);
    const __m512i bulge =
        _mm512_maskz_permutexvar_epi8(0x5555555555555555, _mm512_srli_epi16(straight, 1), _mm512_loadu_si512(kBulge));
    const __m512i bits = _mm512_sub_epi16(straight, bulge);
    _mm512_storeu_si512(weights, bits);
    total_ = _mm512_dpbf16_ps(total_, reinterpret_cast<__m512bh>(bits),
                              reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80)));
  }

  // Hidden keys have scores of -inf, which weigh nothing.
  void weigh_seen(const float* scores, bf16* weights, int64_t, int64_t) { weigh(scores, weights); }

  float sum() const { return _mm512_reduce_add_ps(total_); }

  // NaN gets no weight here, like -inf. vmaxps raises the CPU's invalid-operation flag for NaN, at no cost: scores are
  // searched only if it was raised since it was cleared here.
  static void watch_for_nan() { _mm_setcsr(_mm_getcsr() & ~_MM_EXCEPT_INVALID); }
  static bool hides_nan(const float* scores, int width, float maximum) {
    if (!(maximum > kMinusInfinity && maximum < -kMinusInfinity)) return true;  // then no exponent is a number
    asm volatile("" : : "x"(maximum) : "memory");  // the compiler must not move the maximum behind the flag's reading
    return (_mm_getcsr() & _MM_EXCEPT_INVALID) && has_nan(scores, width);
  }

 private:
  // 128 (f - (2^f - 1)) for f = (2 i + 1/2) / 128.
  static constexpr uint8_t kBulge[64] = {0,  1,  1,  2,  2,  3,  4,  4,  5,  5,  5,  6,  6,  7,  7,  8,
                                         8,  8,  9,  9,  9,  9,  10, 10, 10, 10, 10, 11, 11, 11, 11, 11,
                                         11, 11, 11, 11, 11, 11, 11, 11, 11, 10, 10, 10, 10, 10, 9,  9,
                                         9,  8,  8,  8,  7,  7,  6,  6,  5,  5,  4,  3,  3,  2,  1,  1};
  __m512 scale_, offset_, total_;
};

}  // namespace
}  // namespace tilewright
