// Whole tiles of bf16 keys and values (base/kv_layout.h), rearranged in registers: of SSE2, which every x86-64 has, a
// quarter of the time that a store per pair takes, or of AVX-512 where the file is compiled for it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "base/bf16.h"
#include "base/tile.h"

namespace tilewright {

#ifdef __AVX512F__
// One tile: 16 tokens of 16 pairs as 16 pairs of 16 tokens, 2 x 2 and 4 x 4 within quarters of registers, then the
// quarters.
TILEWRIGHT_INLINE void pack_key_tile(const bf16* k, int64_t token_stride, bf16* tile) {
  __m512i from[16], to[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    const __m512i even = _mm512_loadu_si512(k + i * token_stride), odd = _mm512_loadu_si512(k + (i + 1) * token_stride);
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
#endif

// 16 tokens of bf16 keys as the columns of their tiles; on SSE2 four tokens and four pairs of dims at a time. `width`
// is a multiple of 8; what pads it to a whole tile is left as it is.
TILEWRIGHT_INLINE void pack_key_tiles(const bf16* k, int64_t token_stride, int64_t width, bf16* tiles) {
  int64_t d = 0;
#ifdef __AVX512F__
  for (; d + kTileDepth <= width; d += kTileDepth) pack_key_tile(k + d, token_stride, tiles + d * kTileColumns);
#endif
  for (; d < width; d += 8) {
    for (int column = 0; column < kTileColumns; column += 4) {
      __m128i pairs[4];
      for (int i = 0; i < 4; ++i)
        pairs[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(k + (column + i) * token_stride + d));
      const __m128i low01 = _mm_unpacklo_epi32(pairs[0], pairs[1]), low23 = _mm_unpacklo_epi32(pairs[2], pairs[3]);
      const __m128i high01 = _mm_unpackhi_epi32(pairs[0], pairs[1]), high23 = _mm_unpackhi_epi32(pairs[2], pairs[3]);
      bf16* row = tiles + d / 2 * 32 + column * 2;  // rows of 16 pairs, through all depth tiles
      auto put = [&](int i, __m128i four) { _mm_storeu_si128(reinterpret_cast<__m128i*>(row + i * 32), four); };
      put(0, _mm_unpacklo_epi64(low01, low23));
      put(1, _mm_unpackhi_epi64(low01, low23));
      put(2, _mm_unpacklo_epi64(high01, high23));
      put(3, _mm_unpackhi_epi64(high01, high23));
    }
  }
}

// 32 tokens of bf16 values as a row of tiles: two tokens are woven into each tile row. `width` is a multiple of 8.
TILEWRIGHT_INLINE void pack_value_tiles(const bf16* v, int64_t token_stride, int64_t width, bf16* tiles) {
  for (int depth = 0; depth < kTileDepth; depth += 2, v += 2 * token_stride) {
    for (int64_t d = 0; d < width; d += 8) {
      const __m128i even = _mm_loadu_si128(reinterpret_cast<const __m128i*>(v + d));
      const __m128i odd = _mm_loadu_si128(reinterpret_cast<const __m128i*>(v + token_stride + d));
      bf16* row = tiles + d / kTileColumns * kTileElements + depth / 2 * 32 + d % kTileColumns * 2;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(row), _mm_unpacklo_epi16(even, odd));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(row + 8), _mm_unpackhi_epi16(even, odd));
    }
  }
}

}  // namespace tilewright
