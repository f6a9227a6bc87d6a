// The right-hand operand of a product of a chunk: tiles (base/tile.h) of a strip of 32 columns.
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

}  // namespace
}  // namespace tilewright
