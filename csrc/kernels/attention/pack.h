// Packs keys and values of packed sequences as the tiles of pages. Include after a Vec.
#pragma once

#include <type_traits>

#include "base/kv_tiles.h"
#include "kernels/attention/attention.h"

namespace tilewright {
namespace {

// Stores two elements that are adjacent in a bf16 tile row, or in the two halves of an fp32 one.
inline void put_pairs(bf16* row, const bf16* even, const bf16* odd, int columns) {
  // One 32-bit store per column: a loop that the compiler vectorises.
  for (int c = 0; c < columns; ++c) {
    const uint32_t pair = even[c].bits | static_cast<uint32_t>(odd[c].bits) << 16;
    __builtin_memcpy(row + 2 * c, &pair, 4);
  }
}

inline void put_pairs(float* row, const float* even, const float* odd, int columns) {
  for (int c = 0; c < columns; ++c) row[c] = even[c], row[kTileColumns + c] = odd[c];
}

// Packs 32 tokens of a head as two columns of key tiles: tile row r holds dims 2r, 2r+1 of 16 tokens.
template <class T>
void pack_keys_as(const VarlenArgs& args, const TokenPiece& piece, int64_t head, T* tiles) {
  const KvLayout& layout = args.attention.layout;
  const int64_t count = piece.count, width = layout.head_width, depth_tiles = layout.key_depth_tiles();
  if (count < kTileDepth || width % kTileDepth) __builtin_memset(tiles, 0, 2 * depth_tiles * kTileElements * sizeof(T));
  const T* k = args.k.row<T>(piece.token, head);
  if constexpr (std::is_same_v<T, bf16>) {
    if (count == kTileDepth && width % 8 == 0) {
      for (int half = 0; half < kTileDepth; half += kTileColumns)
        pack_key_tiles<Vec>(k + half * args.k.token_stride, args.k.token_stride, width,
                            tiles + half / kTileColumns * depth_tiles * kTileElements);
      return;
    }
  }
  for (int64_t column = 0; column < count; ++column, k += args.k.token_stride) {
    T* tile = tiles + column / kTileColumns * depth_tiles * kTileElements;
    T* at = tile + tile_offset<T>(0, static_cast<int>(column % kTileColumns));
    // Pairs of one token are a tile row of 32 elements apart, through all its depth tiles.
    int64_t d = 0;
    for (; d + 2 <= width; d += 2, at += 32) put_pairs(at, k + d, k + d + 1, 1);
    if (d < width) at[0] = k[d];
  }
}

// Packs 32 tokens of a head as a row of value tiles: tile row r holds tokens 2r, 2r+1, interleaved by dim.
template <class T>
void pack_values_as(const VarlenArgs& args, const TokenPiece& piece, int64_t head, T* tiles) {
  const KvLayout& layout = args.attention.layout;
  const int64_t count = piece.count, width = layout.head_width;
  if (count < kTileDepth) __builtin_memset(tiles, 0, layout.value_column_tiles() * kTileElements * sizeof(T));
  const T* v = args.v.row<T>(piece.token, head);
  if constexpr (std::is_same_v<T, bf16>) {
    if (count == kTileDepth && width % 8 == 0) return pack_value_tiles(v, args.v.token_stride, width, tiles);
  }
  static constexpr T kZeros[kTileColumns] = {};
  for (int64_t depth = 0; depth < count; depth += 2, v += 2 * args.v.token_stride) {
    T* row = tiles + depth / 2 * 32;
    const bool last = depth + 1 == count;
    for (int64_t d = 0; d < width; d += kTileColumns, row += kTileElements) {
      const T* odd = last ? kZeros : v + args.v.token_stride + d;
      if (d + kTileColumns <= width)
        put_pairs(row, v + d, odd, kTileColumns);
      else
        put_pairs(row, v + d, odd, static_cast<int>(width - d));
    }
  }
}

void pack_keys(const VarlenArgs& args, const TokenPiece& piece, int64_t head, void* tiles) {
  if (args.attention.kv_dtype == DType::f32)
    pack_keys_as(args, piece, head, static_cast<float*>(tiles));
  else
    pack_keys_as(args, piece, head, static_cast<bf16*>(tiles));
}

void pack_values(const VarlenArgs& args, const TokenPiece& piece, int64_t head, void* tiles) {
  if (args.attention.kv_dtype == DType::f32)
    pack_values_as(args, piece, head, static_cast<float*>(tiles));
  else
    pack_values_as(args, piece, head, static_cast<bf16*>(tiles));
}

}  // namespace
}  // namespace tilewright
