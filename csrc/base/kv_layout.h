// How keys and values lie in memory: as the right-hand tiles (base/tile.h) of the two products of attention.
//
// A page holds `page_size` tokens (a multiple of 32) of every kv head; per head, keys then values:
//   keys    [page_size / 16][depth / 32] tiles   depth = head width, columns = 16 tokens     (scores = Q K^T)
//   values  [page_size / 32][columns / 16] tiles depth = 32 tokens, columns = head width     (output = P V)
// so that one head of one page is a single stream, read once for each product.
// Padding of the head width is zero in keys (the kernels multiply it) and undefined in values (they do not store it).
#pragma once

#include <cstdint>

#include "base/tile.h"

namespace tilewright {

struct KvLayout {
  int64_t page_size = 0;
  int64_t num_heads = 0;
  int64_t head_width = 0;

  TILEWRIGHT_INLINE constexpr int64_t key_depth_tiles() const { return ceil_div(head_width, kTileDepth); }
  TILEWRIGHT_INLINE constexpr int64_t value_column_tiles() const { return ceil_div(head_width, kTileColumns); }
  TILEWRIGHT_INLINE constexpr int64_t key_elements() const { return page_size * key_depth_tiles() * kTileDepth; }
  TILEWRIGHT_INLINE constexpr int64_t value_elements() const { return page_size * value_column_tiles() * kTileColumns; }
  TILEWRIGHT_INLINE constexpr int64_t head_elements() const { return key_elements() + value_elements(); }
  TILEWRIGHT_INLINE constexpr int64_t page_elements() const { return num_heads * head_elements(); }

  // Element offsets within one head of one page.
  TILEWRIGHT_INLINE constexpr int64_t key_tile(int64_t token) const {
    return token / kTileColumns * key_depth_tiles() * kTileElements;
  }
  TILEWRIGHT_INLINE constexpr int64_t value_tile(int64_t token) const {
    return key_elements() + token / kTileDepth * value_column_tiles() * kTileElements;
  }
};

}  // namespace tilewright
