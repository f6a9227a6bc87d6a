// c[rows, 16 * column_tiles] = A B with B in tiles (base/tile.h), for machines without AMX. Include after a Vec.
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
inline constexpr int kDotTiles = Vec::kLanes == 16 ? 2 : 1;
inline constexpr int kDotVecs = kTileColumns / Vec::kLanes;

inline void load_pair(const float* p, Vec& even, Vec& odd) {
  even = Vec::load(p);
  odd = Vec::load(p + kTileColumns);
}

// Left bf16 (with B in bf16) multiplies pairs as they are, by vdpbf16ps; left fp32 widens B.
template <class Left, class TB, int kRows, int kTiles, class TileAt>
inline void dot_block(const Left* a, int64_t lda, TileAt tile_at, int tile, int depth_tiles, float* c, int64_t ldc) {
  Vec acc[kRows][kTiles][kDotVecs];
  for (auto& row : acc)
    for (auto& column : row)
      for (Vec& v : column) v = Vec::zero();
  for (int d = 0; d < depth_tiles; ++d) {
    const TB* b[kTiles];
    for (int t = 0; t < kTiles; ++t) b[t] = tile_at(d, tile + t);
    const Left* left = a + d * kTileDepth;
    for (int pair = 0; pair < kTileDepth / 2; ++pair) {
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) {
#pragma GCC unroll 4
        for (int v = 0; v < kDotVecs; ++v) {
          const TB* p = b[t] + pair * 32 + v * Vec::kLanes * (sizeof(TB) == 2 ? 2 : 1);
#ifdef __AVX512BF16__
          if constexpr (std::is_same_v<Left, bf16>) {
            const __m512bh pairs = reinterpret_cast<__m512bh>(_mm512_loadu_si512(p));
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
              int32_t both;
              __builtin_memcpy(&both, left + r * lda + pair * 2, 4);
              acc[r][t][v].v =
                  _mm512_dpbf16_ps(acc[r][t][v].v, reinterpret_cast<__m512bh>(_mm512_set1_epi32(both)), pairs);
            }
          }
#endif
          if constexpr (std::is_same_v<Left, float>) {
            Vec even, odd;
            load_pair(p, even, odd);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
              acc[r][t][v] = fma(even, Vec::set1(left[r * lda + pair * 2]), acc[r][t][v]);
              acc[r][t][v] = fma(odd, Vec::set1(left[r * lda + pair * 2 + 1]), acc[r][t][v]);
            }
          }
        }
      }
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

template <class TB, class Left, class TileAt>
inline void multiply_tiles(const Left* a, int64_t lda, int rows, TileAt tile_at, int column_tiles, int depth_tiles,
                           float* c, int64_t ldc) {
  for (int row = 0; row < rows; row += kDotRows) {
    const int count = rows - row < kDotRows ? rows - row : kDotRows;
    with_rows<kDotRows>(count, [&](auto num_rows) {
      int tile = 0;
      for (; tile + kDotTiles <= column_tiles; tile += kDotTiles)
        dot_block<Left, TB, num_rows.value, kDotTiles>(a + row * lda, lda, tile_at, tile, depth_tiles,
                                                       c + row * ldc + tile * kTileColumns, ldc);
      for (; tile < column_tiles; ++tile)
        dot_block<Left, TB, num_rows.value, 1>(a + row * lda, lda, tile_at, tile, depth_tiles,
                                               c + row * ldc + tile * kTileColumns, ldc);
    });
  }
}

}  // namespace
}  // namespace tilewright
