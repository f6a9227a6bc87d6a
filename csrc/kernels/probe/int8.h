// The int8 multiply loop without VNNI: u8 x s8 pairs to s16, pairs of those to s32, then added. Include after
// generic.h in an AVX2 or AVX-512 file.
#pragma once

#include <immintrin.h>

namespace tilewright {
namespace {

#ifdef __AVX512BW__
using Bytes = __m512i;
inline Bytes set_bytes(char value) { return _mm512_set1_epi8(value); }
inline Bytes multiply_add_bytes(Bytes sum, Bytes a, Bytes b) {
  const Bytes ones = _mm512_set1_epi16(1);
  return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(a, b), ones));
}
#else
using Bytes = __m256i;
inline Bytes set_bytes(char value) { return _mm256_set1_epi8(value); }
inline Bytes multiply_add_bytes(Bytes sum, Bytes a, Bytes b) {
  const Bytes ones = _mm256_set1_epi16(1);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
}
#endif

int64_t multiply_int8(int64_t rounds, float* sink) {
  constexpr int kByteChains = 8;  // a round trip of three instructions each, so fewer chains fill the ports
  const Bytes b = set_bytes(-3);
  Bytes chains[kByteChains];
  for (int c = 0; c < kByteChains; ++c) chains[c] = set_bytes(static_cast<char>(c));
  // The chain's own bytes are the operand: with a constant one the product would be computed once, outside the loop.
  for (int64_t round = 0; round < rounds; ++round)
    for (int c = 0; c < kByteChains; ++c) chains[c] = multiply_add_bytes(chains[c], chains[c], b);
  for (int c = 1; c < kByteChains; ++c) chains[0] = multiply_add_bytes(chains[0], chains[c], b);
  int32_t first;
  __builtin_memcpy(&first, &chains[0], sizeof(first));
  *sink = static_cast<float>(first);
  return rounds * kByteChains * static_cast<int64_t>(sizeof(Bytes)) * 2;
}

}  // namespace
}  // namespace tilewright
