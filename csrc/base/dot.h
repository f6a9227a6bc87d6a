// c[rows, 16 * column_tiles] = A B, or += when `accumulate`, with B in tiles (base/tile.h), on vectors. Include after a
// Vec.
//
// Every output is one chain of fused multiply-adds in order of depth, for any number of rows: a row's result does not
// depend on the other rows, so greedy decoding does not depend on the batch.
#pragma once

#include <type_traits>
#include <utility>

#include "base/bf16.h"
#include "base/product_name.h"
#include "base/tile.h"

namespace tilewright {
namespace {

inline constexpr int kDotRows = DotTraits::kRows;
inline constexpr int kDotVecs = kTileColumns / Vec::kLanes;

// The product of bf16 tiles.
inline constexpr ProductName kDotProduct = {Vec::kHasBf16Dot ? "bf16_bf16_fp32" : "fp32_bf16_fp32", kDotRows,
                                            DotTraits::tiles(kDotRows) * kTileColumns, Vec::kHasBf16Dot ? 2 : 1};

// From this number of rows on, converting bf16 tiles to fp32 once costs less than doing it for each kDotRows of them.
inline constexpr int kRowsToWiden = 4 * kDotRows;

// Converts a tile of bf16 to fp32.
inline void widen_tile(const bf16* tile, float* wide) {
  for (int row = 0; row < kTileElements; row += 32)
    for (int column = 0; column < kTileColumns; column += Vec::kLanes) {
      Vec even, odd;
      load_pair(tile + row + 2 * column, even, odd);
      even.store(wide + row + column);
      odd.store(wide + row + kTileColumns + column);
    }
}

// Columns of both depths of a pair row.
inline void load_columns(const float* row, int column, Vec& even, Vec& odd) {
  even = Vec::load(row + column);
  odd = Vec::load(row + kTileColumns + column);
}
inline void load_columns(const bf16* row, int column, Vec& even, Vec& odd) { load_pair(row + 2 * column, even, odd); }

// Columns of one of the two depths.
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

// Vector type of the rows of A in products.
template <class Left>
using LeftVec = std::conditional_t<std::is_same_v<Left, float>, Vec, PairVec>;

template <int kRows, int kTiles>
using Sums = Vec[kRows][kTiles][kDotVecs];

// Rows of A from some depth on. Every third row has a pointer, and the addresses of the two after it add the stride
// once or twice: twelve pointers do not fit the address registers beside all else, and fetching them from vector
// registers or from the stack cost a fifth of the speed.
template <class Left, int kRows>
class RowPointers {
 public:
  TILEWRIGHT_INLINE RowPointers(const Left* left, int64_t lda) : lda_(lda) {
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) pointers_[i] = left + 3 * i * lda;
    hide();
  }
  TILEWRIGHT_INLINE const Left* operator[](int r) const { return pointers_[r / 3] + r % 3 * lda_; }
  TILEWRIGHT_INLINE void advance(int depths) {
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) pointers_[i] += depths;
    hide();
  }

 private:
  // Hides the pointers from the compiler, which would otherwise make one for each row after all.
  TILEWRIGHT_INLINE void hide() {
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) __asm__("" : "+r"(pointers_[i]));
  }
  static constexpr int kPointers = (kRows + 2) / 3;
  const Left* pointers_[kPointers];
  int64_t lda_;
};

// acc += one depth of A's rows, the kDepth-th after `left` and `pair`, times B's columns, in fp32.
template <int kDepth, class TB, int kRows, int kTiles>
TILEWRIGHT_INLINE void multiply_depth(const RowPointers<float, kRows>& left, const TB* const (&b)[kTiles], int pair,
                                      Sums<kRows, kTiles>& acc) {
  Vec columns[kTiles][kDotVecs];
#pragma GCC unroll 2
  for (int t = 0; t < kTiles; ++t)
#pragma GCC unroll 4
    for (int v = 0; v < kDotVecs; ++v)
      columns[t][v] = load_depth<kDepth % 2>(b[t] + (pair + kDepth / 2) * 32, v * Vec::kLanes);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
    const Vec row = Vec::set1(left[r][kDepth]);
#pragma GCC unroll 2
    for (int t = 0; t < kTiles; ++t)
#pragma GCC unroll 4
      for (int v = 0; v < kDotVecs; ++v) acc[r][t][v] = fma(columns[t][v], row, acc[r][t][v]);
  }
}

// acc += both depths of a pair in fp32, for levels that multiply by a lane: A's are lanes kLane and kLane + 1.
template <int kLane, class TB, int kRows, int kTiles>
TILEWRIGHT_INLINE void multiply_lanes(const Vec (&left)[kRows], const TB* const (&b)[kTiles], int pair,
                                      Sums<kRows, kTiles>& acc) {
#pragma GCC unroll 2
  for (int t = 0; t < kTiles; ++t)
#pragma GCC unroll 4
    for (int v = 0; v < kDotVecs; ++v) {
      Vec even, odd;
      load_columns(b[t] + pair * 32, v * Vec::kLanes, even, odd);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) acc[r][t][v] = fma_lane<kLane>(even, left[r], acc[r][t][v]);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) acc[r][t][v] = fma_lane<kLane + 1>(odd, left[r], acc[r][t][v]);
    }
}

// acc += both depths of a pair, bf16 times bf16: dot_row(row, columns, sum) is the level's dot product with A's row,
// from memory or from a lane of a vector.
template <class Pairs, int kRows, int kTiles, class DotRow>
TILEWRIGHT_INLINE void multiply_pair(const bf16* const (&b)[kTiles], int pair, Sums<kRows, kTiles>& acc,
                                     DotRow dot_row) {
#pragma GCC unroll 2
  for (int t = 0; t < kTiles; ++t)
#pragma GCC unroll 4
    for (int v = 0; v < kDotVecs; ++v) {
      const Pairs columns = Pairs::load(b[t] + pair * 32 + v * Vec::kLanes * 2);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) acc[r][t][v] = dot_row(r, columns, acc[r][t][v]);
    }
}

// Few rows: B comes from memory, at full speed if it is prefetched early enough.
template <int kRows, class TB, int kTiles>
TILEWRIGHT_INLINE void prefetch_pair(const TB* const (&b)[kTiles], int pair) {
  if constexpr (DotTraits::prefetches(kRows, sizeof(TB)))
    for (int t = 0; t < kTiles; ++t)
      for (size_t line = 0; line < sizeof(TB) / 2; ++line)
        __builtin_prefetch(reinterpret_cast<const char*>(b[t] + pair * 32) + 64 * line + DotTraits::kPrefetchBytes);
}

// acc += the rows of A at `left` times one tile of depth, a pair of depths at a time.
template <class Left, class TB, int kRows, int kTiles>
TILEWRIGHT_INLINE void multiply_tile_by_pairs(const Left* left, int64_t lda, const TB* const (&b)[kTiles],
                                              Sums<kRows, kTiles>& acc) {
  RowPointers<Left, kRows> rows(left, lda);
  for (int pair = 0; pair < kTileDepth / 2; pair += 2, rows.advance(4)) {
    prefetch_pair<kRows>(b, pair);
    prefetch_pair<kRows>(b, pair + 1);
    if constexpr (std::is_same_v<Left, float>) {
      multiply_depth<0>(rows, b, pair, acc);
      multiply_depth<1>(rows, b, pair, acc);
      multiply_depth<2>(rows, b, pair, acc);
      multiply_depth<3>(rows, b, pair, acc);
    } else {
      using Pairs = LeftVec<Left>;
#pragma GCC unroll 2
      for (int second = 0; second < 2; ++second)
        multiply_pair<Pairs>(b, pair + second, acc, [&](int r, Pairs columns, Vec sum) __attribute__((always_inline)) {
          return dot(Pairs::set1(rows[r] + 2 * second), columns, sum);
        });
    }
  }
}

// acc += the same for levels that multiply by a lane: as many depths at a time as a vector of A has.
template <class Left, class TB, int kRows, int kTiles>
TILEWRIGHT_INLINE void multiply_tile_by_lanes(const Left* left, int64_t lda, const TB* const (&b)[kTiles],
                                              Sums<kRows, kTiles>& acc) {
  using Lefts = LeftVec<Left>;
  constexpr int kDepths = 16 / sizeof(Left), kPairs = kDepths / 2;
  const TB* at[kTiles];
#pragma GCC unroll 2
  for (int t = 0; t < kTiles; ++t) at[t] = b[t];
  for (int depth = 0; depth < kTileDepth; depth += kDepths) {
    Lefts rows[kRows];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) rows[r] = Lefts::load(left + r * lda + depth);
    auto multiply = [&](auto in_vec) __attribute__((always_inline)) {
      constexpr int kPair = decltype(in_vec)::value;
      prefetch_pair<kRows>(at, kPair);
      if constexpr (std::is_same_v<Left, float>)
        multiply_lanes<2 * kPair>(rows, at, kPair, acc);
      else
        multiply_pair<Lefts>(at, kPair, acc, [&](int r, Lefts columns, Vec sum) __attribute__((always_inline)) {
          return dot_lane<kPair>(columns, rows[r], sum);
        });
    };
    [&]<int... kPair>(std::integer_sequence<int, kPair...>) __attribute__((always_inline)) {
      (multiply(std::integral_constant<int, kPair>{}), ...);
    }(std::make_integer_sequence<int, kPairs>{});
    // Hidden from the compiler, which would otherwise compute an address for each load: a fifth of all instructions.
#pragma GCC unroll 2
    for (int t = 0; t < kTiles; ++t) {
      at[t] += kPairs * 32;
      __asm__("" : "+r"(at[t]));
    }
  }
}

// Rows of A with consecutive tiles of depth. Other layouts define their own `at`.
template <class Left>
struct LeftRows {
  using Element = Left;
  const Left* data;

  const Left* at(int depth_tile) const { return data + depth_tile * kTileDepth; }
};

// Tiles of B by depth and column. Products are compiled for each type of them, once for each number of rows: tiles of
// one layout share a type, where every lambda would be another one.

// Tiles of a strip of weights, one depth after the other.
template <class T>
struct StripTiles {
  static constexpr int kColumns = 2;
  const T* data;

  const T* operator()(int depth, int column) const { return data + (depth * 2 + column) * kTileElements; }
};

// Tiles of one column.
template <class T>
struct ColumnTiles {
  static constexpr int kColumns = 1;
  const T* data;

  const T* operator()(int depth, int) const { return data + depth * kTileElements; }
};

// Column tiles that are multiplied side by side for a number of rows, and whether some may be left over: not if the
// type of the tiles says that there are just so many.
template <class TileAt>
constexpr int tiles_of(int rows) {
  if constexpr (requires { TileAt::kColumns; })
    return DotTraits::tiles(rows) < TileAt::kColumns ? DotTraits::tiles(rows) : TileAt::kColumns;
  else
    return DotTraits::tiles(rows);
}
template <class TileAt>
constexpr bool leaves_tile(int tiles) {
  if constexpr (requires { TileAt::kColumns; })
    return TileAt::kColumns % tiles > 0;
  else
    return tiles > 1;
}

// left.at(d) points to tile d of depth of the rows of A, lda apart. bf16 rows (with B in bf16) are multiplied as pairs;
// fp32 rows widen B.
template <class TB, int kRows, int kTiles, class LeftSide, class TileAt>
inline void dot_block(const LeftSide& left_side, int64_t row, int64_t lda, TileAt tile_at, int tile, int depth_tiles,
                      bool accumulate, float* c, int64_t ldc) {
  Sums<kRows, kTiles> acc;
  if (accumulate) {
    for (int r = 0; r < kRows; ++r)
      for (int t = 0; t < kTiles; ++t)
        for (int v = 0; v < kDotVecs; ++v) acc[r][t][v] = Vec::load(c + r * ldc + t * kTileColumns + v * Vec::kLanes);
  } else {
    for (int r = 0; r < kRows; ++r)
      for (int t = 0; t < kTiles; ++t)
        for (int v = 0; v < kDotVecs; ++v) acc[r][t][v] = Vec::zero();
  }
  for (int d = 0; d < depth_tiles; ++d) {
    const TB* b[kTiles];
    for (int t = 0; t < kTiles; ++t) b[t] = tile_at(d, tile + t);
    const typename LeftSide::Element* left = left_side.at(d) + row * lda;
    if constexpr (requires { multiply_row_by_tile(left, b, acc[0]); } && kRows == 1)
      multiply_row_by_tile(left, b, acc[0]);
    else if constexpr (Vec::kHasFmaByLane)
      multiply_tile_by_lanes(left, lda, b, acc);
    else
      multiply_tile_by_pairs(left, lda, b, acc);
  }
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTiles; ++t)
      for (int v = 0; v < kDotVecs; ++v) acc[r][t][v].store(c + r * ldc + t * kTileColumns + v * Vec::kLanes);
}

// dot_block, not inlined: within its callers gcc 12 keeps the row addresses on the stack and reloads them in the
// innermost loop, which costs a tenth of the speed if every fourth product has a load.
template <class TB, int kRows, int kTiles, class LeftSide, class TileAt>
__attribute__((noinline)) void dot_block_apart(const LeftSide& left_side, int64_t row, int64_t lda, TileAt tile_at,
                                               int tile, int depth_tiles, bool accumulate, float* c, int64_t ldc) {
  dot_block<TB, kRows, kTiles>(left_side, row, lda, tile_at, tile, depth_tiles, accumulate, c, ldc);
}

template <class TB, int kRows, int kTiles, class LeftSide, class TileAt>
inline void multiply_block(const LeftSide& left_side, int64_t row, int64_t lda, TileAt tile_at, int tile,
                           int depth_tiles, bool accumulate, float* c, int64_t ldc) {
  if constexpr (Vec::kHasFmaByLane)
    dot_block_apart<TB, kRows, kTiles>(left_side, row, lda, tile_at, tile, depth_tiles, accumulate, c, ldc);
  else
    dot_block<TB, kRows, kTiles>(left_side, row, lda, tile_at, tile, depth_tiles, accumulate, c, ldc);
}

// Calls fn with rows as a compile-time constant from 1 to kMax.
template <int kMax, class Fn>
inline void with_rows(int rows, Fn fn) {
  if constexpr (kMax > 1) {
    if (rows < kMax) return with_rows<kMax - 1>(rows, fn);
  }
  fn(std::integral_constant<int, kMax>{});
}

// c = or += A B for any left side.
template <class TB, class LeftSide, class TileAt>
inline void multiply_side(const LeftSide& left, int64_t lda, int rows, TileAt tile_at, int column_tiles,
                          int depth_tiles, float* c, int64_t ldc, bool accumulate = false) {
  // Equal blocks: 13 rows as 7 + 6, not 12 + 1, since few rows wait for the loads of B.
  int blocks = (rows + kDotRows - 1) / kDotRows;
  for (int row = 0, count = 0; blocks > 0; row += count, --blocks) {
    count = (rows - row + blocks - 1) / blocks;
    with_rows<kDotRows>(count, [&](auto num_rows) {
      constexpr int kTiles = tiles_of<TileAt>(num_rows.value);
      int tile = 0;
      for (; tile + kTiles <= column_tiles; tile += kTiles)
        multiply_block<TB, num_rows.value, kTiles>(left, row, lda, tile_at, tile, depth_tiles, accumulate,
                                                   c + row * ldc + tile * kTileColumns, ldc);
      if constexpr (leaves_tile<TileAt>(kTiles))
        for (; tile < column_tiles; ++tile)
          multiply_block<TB, num_rows.value, 1>(left, row, lda, tile_at, tile, depth_tiles, accumulate,
                                                c + row * ldc + tile * kTileColumns, ldc);
    });
  }
}

template <class TB, class Left, class TileAt>
inline void multiply_tiles(const Left* a, int64_t lda, int rows, TileAt tile_at, int column_tiles, int depth_tiles,
                           float* c, int64_t ldc, bool accumulate = false) {
  multiply_side<TB>(LeftRows<Left>{a}, lda, rows, tile_at, column_tiles, depth_tiles, c, ldc, accumulate);
}

}  // namespace
}  // namespace tilewright
