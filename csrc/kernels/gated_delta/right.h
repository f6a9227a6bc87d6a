// Operands of a chunk's products: the right-hand side, tiles (base/tile.h) of a strip of 32 columns, and memory to
// prefetch on the way.
#pragma once

#include <cstdint>

#include "base/tile.h"

namespace tilewright {
namespace {

template <class T>
struct Right {
  T* data;
  int64_t depth_stride, column_stride;  // elements from tile to tile
  int64_t part_stride;                  // elements from the tiles of one part to those of the next

  T* tile(int64_t depth, int64_t column) const { return data + depth * depth_stride + column * column_stride; }

  // Tiles [depth tiles][2 columns][512], one part after the other.
  static Right of_strip(T* data, int64_t depth_tiles) {
    return {data, 2 * kTileElements, kTileElements, depth_tiles * 2 * kTileElements};
  }
};

// Rows to be prefetched a line at a time: they are a token's whole width apart, which no hardware prefetcher follows.
struct RowPrefetch {
  const char* row;
  int64_t stride_bytes, row_bytes;
  int64_t num_rows, offset = 0;

  void next() {
    // Into L2: rows a multiple of 4 KB apart would all fall into one set of L1.
    __builtin_prefetch(row + offset, 0, 2);
    offset += 64;
    if (offset < row_bytes) return;
    offset = 0;
    row += stride_bytes;
    --num_rows;
  }
};

// The rows of the next chunk; the products of this one prefetch some of their lines at each step.
struct Fetches {
  RowPrefetch rows[3];

  void some(int lines) {
    for (RowPrefetch& fetch : rows)
      for (; fetch.num_rows > 0 && lines > 0; --lines) fetch.next();
  }
};

}  // namespace
}  // namespace tilewright
