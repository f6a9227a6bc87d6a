// The multiply loops of AVX-512. Include after generic.h.
#pragma once

#include <immintrin.h>

namespace tilewright {
namespace {

#ifdef __AVX512BF16__
int64_t multiply_bf16(int64_t rounds, float* sink) {
  const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.875f), _mm512_set1_ps(-0.75f));
  const __m512bh b = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.125f), _mm512_set1_ps(0.25f));
  Vec chains[kChains];
  for (Vec& chain : chains) chain = Vec::zero();
  for (int64_t round = 0; round < rounds; ++round)
    for (Vec& chain : chains) chain.v = _mm512_dpbf16_ps(chain.v, a, b);
  for (int c = 1; c < kChains; ++c) chains[0] = chains[0] + chains[c];
  *sink = reduce_add(chains[0]);
  return rounds * kChains * 2 * Vec::kLanes * 2;
}
#else
inline constexpr MultiplyLoop multiply_bf16 = multiply_fp32;
#endif

// u8 x s8 quads to s32 in one instruction; without VNNI pairs to s16, pairs of those to s32, then added.
using Bytes = __m512i;
inline Bytes set_bytes(char value) { return _mm512_set1_epi8(value); }
inline Bytes multiply_add_bytes(Bytes sum, Bytes a, Bytes b) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(sum, a, b);
#else
  const Bytes ones = _mm512_set1_epi16(1);
  return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(a, b), ones));
#endif
}

}  // namespace
}  // namespace tilewright

#include "kernels/probe/int8_avx.h"
