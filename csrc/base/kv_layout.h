// How keys and values lie in memory: as the right-hand tiles (base/tile.h) of the two products of attention.
//
// A page holds `page_size` tokens (a multiple of 32) of every kv head; per head, keys then values:
//   keys    [page_size / 16][depth / 32] tiles   depth = head width, columns = 16 tokens     (scores = Q K^T)
//   values  [page_size / 32][columns / 16] tiles depth = 32 tokens, columns = head width     (output = P V)
// so that one head of one page is a single stream, read once for each product.
// Padding of the head width is zero in keys (the kernels multiply it) and undefined in values (they do not store it).
//
// In 8 bits an element is a byte, in the order of a bf16 tile, and behind the values of a head come fp32 scales, one
// for each token: [page_size] of keys, [page_size] of values. A byte stands for scale * quant (base/kv_bytes.h).
#pragma once

#include <cstdint>

#include "base/tile.h"

namespace tilewright {

inline constexpr int kMaxHeadWidth = 1024;  // autoencoders attend with one head of all their channels

enum class KvFormat : int { same, int8, fp8 };  // same: the element type of the pages

struct KvLayout {
  int64_t page_size = 0;
  int64_t num_heads = 0;
  int64_t head_width = 0;
  KvFormat format = KvFormat::same;

  TILEWRIGHT_INLINE constexpr int64_t key_depth_tiles() const { return ceil_div(head_width, kTileDepth); }
  TILEWRIGHT_INLINE constexpr int64_t value_column_tiles() const { return ceil_div(head_width, kTileColumns); }
  TILEWRIGHT_INLINE constexpr int64_t key_elements() const { return page_size * key_depth_tiles() * kTileDepth; }
  TILEWRIGHT_INLINE constexpr int64_t value_elements() const { return page_size * value_column_tiles() * kTileColumns; }
  TILEWRIGHT_INLINE constexpr int64_t head_elements() const {
    return key_elements() + value_elements() + (format == KvFormat::same ? 0 : 8 * page_size);
  }
  TILEWRIGHT_INLINE constexpr int64_t page_elements() const { return num_heads * head_elements(); }

  // Element offsets within one head of one page.
  TILEWRIGHT_INLINE constexpr int64_t key_tile(int64_t token) const {
    return token / kTileColumns * key_depth_tiles() * kTileElements;
  }
  TILEWRIGHT_INLINE constexpr int64_t value_tile(int64_t token) const {
    return key_elements() + token / kTileDepth * value_column_tiles() * kTileElements;
  }

  // Byte offsets of a token's scales, if the format has them.
  TILEWRIGHT_INLINE constexpr int64_t key_scale(int64_t token) const {
    return key_elements() + value_elements() + 4 * token;
  }
  TILEWRIGHT_INLINE constexpr int64_t value_scale(int64_t token) const { return key_scale(page_size + token); }
};

}  // namespace tilewright
