// The one layout in which every matrix operand that is read again and again is kept: linear weights, K and V.
//
// A tile holds 32 of depth (the axis summed over) by 16 columns, as 16 rows of pairs: row r has depth 2r and 2r+1.
//   bf16  [16 rows][16 columns][2]   one row is 64 bytes, what the widest units take at a time
//   fp32  [16 rows][2][16 columns]   one row is two vectors of columns; fp16 keys and values, where a level makes such,
//                                    lie likewise
// Narrower machines read the same bytes: the even and the odd depth of a bf16 pair come apart with a shift and a mask.
//
// Quantised weights have tiles of 64 of depth by 16 columns, as rows of quads: row r has depths 4r to 4r + 3.
//   bytes    [16 rows][16 columns][4]   one row is 64 bytes
//   nibbles  [8][16 columns][4]         the lower halves of 64 bytes are one row, the upper halves the next
// Bytes that become bf16 before they are multiplied lie as those do.
//
// A packed linear weight W [N, K] is strips of 32 outputs: [ceil(N/32)][ceil(K/32)][2 tiles], zero where padded, so
// that a strip is one contiguous stream. For gate|up weights a strip's first tile is 16 gate rows and its second the
// 16 up rows that belong to them. Where weights are kept in fp16 (packed_weight.h), a strip is its depths one after the
// other, the 32 columns of each a line of 64 bytes.
#pragma once

#include <cstdint>

#include "base/dtype.h"

// For functions of shared headers outside anonymous namespaces: not inlined, they would be weak symbols with the
// instructions of whichever ISA file the linker picks.
#define TILEWRIGHT_INLINE inline __attribute__((always_inline))

namespace tilewright {

inline constexpr int kTileColumns = 16;
inline constexpr int kTileDepth = 32;
inline constexpr int kTileElements = kTileColumns * kTileDepth;
inline constexpr int kStripColumns = 32;
inline constexpr int kQuadTileDepth = 64;
template <int kBits>
inline constexpr int kQuadTileBytes = kTileColumns * kQuadTileDepth * kBits / 8;

TILEWRIGHT_INLINE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
TILEWRIGHT_INLINE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

namespace {

// Offset of (depth, column) in a tile, in elements.
template <class T>
inline constexpr int tile_offset(int depth, int column) {
  if constexpr (kIsBf16<T>)
    return depth / 2 * 32 + column * 2 + depth % 2;
  else
    return depth / 2 * 32 + depth % 2 * 16 + column;
}

// Offset of (depth, column) in a tile of quads, in bytes; with nibbles two depths share a byte.
template <bool kNibbles>
inline constexpr int quad_offset(int depth, int column) {
  return depth / (kNibbles ? 8 : 4) * 64 + column * 4 + depth % 4;
}

// Offset of element (n, k) in a packed linear weight.
template <class T>
inline int64_t packed_offset(int64_t n, int64_t k, int64_t num_depth_tiles) {
  const int64_t tile = (n / kStripColumns * num_depth_tiles + k / kTileDepth) * 2 + n % kStripColumns / kTileColumns;
  return tile * kTileElements + tile_offset<T>(static_cast<int>(k % kTileDepth), static_cast<int>(n % kTileColumns));
}

}  // namespace
}  // namespace tilewright
