// Whole tiles of bf16 keys and values (base/kv_layout.h), rearranged in registers of SSE2, which every x86-64 has: a
// quarter of the time that a store per pair takes.
#pragma once

#include <emmintrin.h>

#include <cstdint>

#include "base/bf16.h"
#include "base/tile.h"

namespace tilewright {

// 16 tokens of bf16 keys as the columns of their tiles, four tokens and four pairs of dims at a time. `width` is a
// multiple of 8; what pads it to a whole tile is left as it is.
TILEWRIGHT_INLINE void pack_key_tiles(const bf16* k, int64_t token_stride, int64_t width, bf16* tiles) {
  for (int64_t d = 0; d < width; d += 8) {
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
