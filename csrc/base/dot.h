// c[rows, 16 * column_tiles] = A B, or += when kAccumulate, with B in tiles (base/tile.h), for machines without AMX.
// Include after a Vec.
//
// Every output is one chain of fused multiply-adds in order of depth, whatever the number of rows: a row's result does
// not depend on the rows beside it, which is what makes greedy decoding independent of the batch.
#pragma once

#include <type_traits>

#include "base/bf16.h"
#include "base/tile.h"

namespace tilewright {
namespace {

// Rows and column tiles kept in registers: 12 x 2 of 32 registers (AVX-512), 6 x 1 x 2 of 16 (AVX2).
inline constexpr int kDotRows = Vec::kLanes == 16 ? 12 : Vec::kLanes == 8 ? 6 : 2;
inline constexpr int kDotVecs = kTileColumns / Vec::kLanes;

// A chain of dependent additions is slow: few rows take two tiles at once.
constexpr int dot_tiles(int rows) { return Vec::kLanes == 16 || (Vec::kLanes == 8 && rows <= 3) ? 2 : 1; }

// Columns of one depth, the even or the odd one of a pair row.
template <int kParity>
inline Vec load_depth(const float* row, int column) {
  return Vec::load(row + kParity * kTileColumns + column);
}
template <int kParity>
inline Vec load_depth(const bf16* row, int column) {
  Vec even, odd;
  load_pair(row + 2 * column, even, odd);
  return kParity ? odd : even;
}

// acc += one depth of A's rows times B's columns, in fp32.
template <int kParity, class TB, int kRows, int kTiles>
inline void multiply_depth(const float* left, int64_t lda, const TB* const (&b)[kTiles], int pair,
                           Vec (&acc)[kRows][kTiles][kDotVecs]) {
  Vec columns[kTiles][kDotVecs];
#pragma GCC unroll 2
  for (int t = 0; t < kTiles; ++t)
#pragma GCC unroll 4
    for (int v = 0; v < kDotVecs; ++v) columns[t][v] = load_depth<kParity>(b[t] + pair * 32, v * Vec::kLanes);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    const Vec row = Vec::set1(left[r * lda + pair * 2 + kParity]);
#pragma GCC unroll 2
    for (int t = 0; t < kTiles; ++t)
#pragma GCC unroll 4
      for (int v = 0; v < kDotVecs; ++v) acc[r][t][v] = fma(columns[t][v], row, acc[r][t][v]);
  }
}

#ifdef __AVX512BF16__
// acc += both depths of a pair, bf16 times bf16, by vdpbf16ps.
template <int kRows, int kTiles>
inline void multiply_pair(const bf16* left, int64_t lda, const bf16* const (&b)[kTiles], int pair,
                          Vec (&acc)[kRows][kTiles][kDotVecs]) {
#pragma GCC unroll 2
  for (int t = 0; t < kTiles; ++t) {
    const __m512bh columns = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b[t] + pair * 32));
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      int32_t both;
      __builtin_memcpy(&both, left + r * lda + pair * 2, 4);
      const __m512bh row = reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
      acc[r][t][0].v = _mm512_dpbf16_ps(acc[r][t][0].v, row, columns);
    }
  }
}
#endif

// Left bf16 (with B in bf16) multiplies pairs as they are; left fp32 widens B.
template <class Left, class TB, bool kAccumulate, int kRows, int kTiles, class TileAt>
inline void dot_block(const Left* a, int64_t lda, TileAt tile_at, int tile, int depth_tiles, float* c, int64_t ldc) {
  Vec acc[kRows][kTiles][kDotVecs];
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTiles; ++t)
      for (int v = 0; v < kDotVecs; ++v)
        acc[r][t][v] = kAccumulate ? Vec::load(c + r * ldc + t * kTileColumns + v * Vec::kLanes) : Vec::zero();
  for (int d = 0; d < depth_tiles; ++d) {
    const TB* b[kTiles];
    for (int t = 0; t < kTiles; ++t) b[t] = tile_at(d, tile + t);
    const Left* left = a + d * kTileDepth;
    for (int pair = 0; pair < kTileDepth / 2; ++pair) {
      if constexpr (kRows <= 4) {
        // Few rows: B comes from memory, at its speed if it is asked for 8 KB ahead.
        for (int t = 0; t < kTiles; ++t)
          for (size_t line = 0; line < sizeof(TB) / 2; ++line)
            __builtin_prefetch(reinterpret_cast<const char*>(b[t] + pair * 32) + 64 * line + 8192);
      }
      if constexpr (std::is_same_v<Left, float>) {
        multiply_depth<0>(left, lda, b, pair, acc);
        multiply_depth<1>(left, lda, b, pair, acc);
      }
#ifdef __AVX512BF16__
      if constexpr (std::is_same_v<Left, bf16>) multiply_pair(left, lda, b, pair, acc);
#endif
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTiles; ++t)
      for (int v = 0; v < kDotVecs; ++v) acc[r][t][v].store(c + r * ldc + t * kTileColumns + v * Vec::kLanes);
}

// Calls fn with rows as a compile-time number from 1 to kMax.
template <int kMax, class Fn>
inline void with_rows(int rows, Fn fn) {
  if constexpr (kMax > 1) {
    if (rows < kMax) return with_rows<kMax - 1>(rows, fn);
  }
  fn(std::integral_constant<int, kMax>{});
}

template <class TB, bool kAccumulate = false, class Left, class TileAt>
inline void multiply_tiles(const Left* a, int64_t lda, int rows, TileAt tile_at, int column_tiles, int depth_tiles,
                           float* c, int64_t ldc) {
  for (int row = 0; row < rows; row += kDotRows) {
    const int count = rows - row < kDotRows ? rows - row : kDotRows;
    with_rows<kDotRows>(count, [&](auto num_rows) {
      constexpr int kTiles = dot_tiles(num_rows.value);
      int tile = 0;
      for (; tile + kTiles <= column_tiles; tile += kTiles)
        dot_block<Left, TB, kAccumulate, num_rows.value, kTiles>(a + row * lda, lda, tile_at, tile, depth_tiles,
                                                                 c + row * ldc + tile * kTileColumns, ldc);
      for (; tile < column_tiles; ++tile)
        dot_block<Left, TB, kAccumulate, num_rows.value, 1>(a + row * lda, lda, tile_at, tile, depth_tiles,
                                                            c + row * ldc + tile * kTileColumns, ldc);
    });
  }
}

}  // namespace
}  // namespace tilewright
