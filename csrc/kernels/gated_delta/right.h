// What the products of a chunk take: the right-hand operand, tiles (base/tile.h) of a strip of 32 columns, and vector
// work to be done beside them.
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

  // [depth tiles][2 columns][512], the parts one after the other.
  static Right of_strip(T* data, int64_t depth_tiles) {
    return {data, 2 * kTileElements, kTileElements, depth_tiles * 2 * kTileElements};
  }
};

// Work in `count` pieces, fn(piece). Tiles are multiplied beside vectors: a product that takes Pieces does some between
// its steps, which then cost next to nothing. Whoever needs the work done calls rest().
template <class Fn>
struct Pieces {
  Fn fn;
  int64_t count;
  int64_t next = 0;

  void some(int64_t pieces) {
    for (const int64_t end = next + pieces < count ? next + pieces : count; next < end; ++next) fn(next);
  }
  void rest() { some(count - next); }
};

struct NoPieces {
  void some(int64_t) {}
};

}  // namespace
}  // namespace tilewright
