// See compare_scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace tilewright {
namespace {

inline uint32_t lanes_at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }

inline Vec keep_bits(Vec a, uint32_t lanes) { return {_mm512_maskz_mov_ps(static_cast<__mmask16>(lanes), a.v)}; }

inline Vec select_bits(Vec a, Vec b, uint32_t lanes) {
  return {_mm512_mask_mov_ps(b.v, static_cast<__mmask16>(lanes), a.v)};
}

// Compressed in a register and stored whole: vcompressps to memory is microcode on Zen 4, some 100 cycles.
inline void store_bits(Vec a, uint32_t lanes, float* out) {
  _mm512_storeu_ps(out, _mm512_maskz_compress_ps(static_cast<__mmask16>(lanes), a.v));
}

}  // namespace
}  // namespace tilewright
