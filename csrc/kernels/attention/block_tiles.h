// Locates the keys and values of a block in the pages.
#pragma once

#include <type_traits>

#include "base/kv_bytes.h"
#include "base/tile.h"
#include "kernels/attention/attention.h"

namespace tilewright {
namespace {

// Tiles of keys or values as the right operand of a product: a pointer for each column of tiles, or for each depth. One
// type for both, since products are compiled for each type.
template <class T>
struct PagedTiles {
  const T* const* starts;
  bool has_columns;  // else a pointer for each depth

  static PagedTiles by_columns(const T* const* columns) { return {columns, true}; }
  static PagedTiles by_depths(const T* const* depths) { return {depths, false}; }
  const T* operator()(int depth, int column) const {
    return has_columns ? starts[column] + depth * kTileElements : starts[depth] + column * kTileElements;
  }
};

// The tiles of a block of keys, located through the block table once per block. T: the type of the pages.
template <class T>
struct BlockTiles {
  static constexpr bool kBytes = std::is_same_v<T, KvByte>;
  const T* keys[kKeyBlock / kTileColumns];
  const T* values[kKeyBlock / kTileDepth];
  const T* scales[kBytes ? kKeyBlock / kTileDepth : 1];  // of the keys of 32 tokens
  int keys_present;                                      // tokens of the block that exist
  int num_columns;                                       // those that some row sees, rounded up to whole value tiles

  BlockTiles() = default;
  // No row sees keys from `seen_end` on: with a causal mask that skips half of the last block.
  BlockTiles(const AttentionArgs& args, const AttentionItem& item, int64_t block, int64_t seen_end, T* last_values) {
    const KvLayout& layout = args.layout;
    const int64_t begin = block * kKeyBlock;
    const int64_t left = args.kv_lengths[item.sequence] - begin;
    keys_present = static_cast<int>(left < kKeyBlock ? left : kKeyBlock);
    const int64_t seen = seen_end - begin < keys_present ? seen_end - begin : keys_present;
    num_columns = static_cast<int>(round_up(seen, kTileDepth));
    const int32_t* page_of = args.block_table + item.sequence * args.block_table_stride + begin / layout.page_size;
    const T* base = static_cast<const T*>(args.pages) + item.head * layout.head_elements();
    const int64_t page_elements = layout.page_elements();
    int64_t in_page = begin % layout.page_size;
    for (int i = 0; i < num_columns; i += kTileDepth) {
      const T* page = base + *page_of * page_elements;
      keys[i / kTileColumns] = page + layout.key_tile(in_page);
      keys[i / kTileColumns + 1] = page + layout.key_tile(in_page + kTileColumns);
      values[i / kTileDepth] = page + layout.value_tile(in_page);
      if constexpr (kBytes) scales[i / kTileDepth] = page + layout.key_scale(in_page);
      in_page += kTileDepth;
      if (in_page == layout.page_size) in_page = 0, ++page_of;
    }
    if constexpr (!kBytes)
      if (keys_present < num_columns) clear_missing(layout, last_values);
  }

  // The scales of 32 tokens of the block, from `token` on.
  void key_scales(int token, float* to) const { __builtin_memcpy(to, scales[token / kTileDepth], 4 * kTileDepth); }

  // Scales of the values; tokens that do not exist yet have a scale of 0 and finite bytes.
  void value_scales(int token, int64_t page_size, float* to) const {
    __builtin_memcpy(to, scales[token / kTileDepth] + 4 * page_size, 4 * kTileDepth);
    for (int i = 0; i < kTileDepth; ++i)
      if (token + i >= keys_present) to[i] = 0.0f;
  }

  // Values of tokens that do not exist yet may be anything, also NaN, and 0 * NaN is NaN: the last, partly filled row
  // of value tiles is read from a copy with zeros in their place.
  void clear_missing(const KvLayout& layout, T* copy) {
    const int last = num_columns / kTileDepth - 1;
    const int present = keys_present % kTileDepth;
    const int64_t elements = layout.value_column_tiles() * kTileElements;
    __builtin_memcpy(copy, values[last], elements * sizeof(T));
    // A tile row has two depths. If only the first exists the second is cleared, and all rows after it.
    const int first_empty = static_cast<int>(round_up(present, 2));
    const int64_t kept = tile_offset<T>(first_empty, 0);
    for (int64_t tile = 0; tile < elements; tile += kTileElements) {
      if (present < first_empty)
        for (int column = 0; column < kTileColumns; ++column) copy[tile + tile_offset<T>(present, column)] = T{};
      __builtin_memset(copy + tile + kept, 0, (kTileElements - kept) * sizeof(T));
    }
    values[last] = copy;
  }
};

}  // namespace
}  // namespace tilewright
