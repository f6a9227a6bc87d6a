// The multiply loops of AVX2. Include after generic.h.
#pragma once

#include <immintrin.h>

namespace tilewright {
namespace {

inline constexpr MultiplyLoop multiply_bf16 = multiply_fp32;

// u8 x s8 pairs to s16, pairs of those to s32, then added.
using Bytes = __m256i;
inline Bytes set_bytes(char value) { return _mm256_set1_epi8(value); }
inline Bytes multiply_add_bytes(Bytes sum, Bytes a, Bytes b) {
  const Bytes ones = _mm256_set1_epi16(1);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
}

}  // namespace
}  // namespace tilewright

#include "kernels/probe/int8_avx.h"
