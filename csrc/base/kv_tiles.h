// Packs whole tiles of bf16 keys and values (base/kv_layout.h) in 128-bit registers, which every machine has: a quarter
// of the time that a store per pair takes.
#pragma once

#include <cstdint>

#include "base/bf16.h"
#include "base/tile.h"

namespace tilewright {
namespace {

// Eight bf16, or four pairs of them. The compiler's own vector types, which every machine supports.
typedef uint16_t Bf16x8 __attribute__((vector_size(16)));
typedef uint32_t Pairx4 __attribute__((vector_size(16)));

// By memcpy, which needs no alignment: rows may begin at any element. (An alignment in the typedef would be lost in a
// template argument.)
template <class Registers, class T>
inline Registers load_registers(const T* p) {
  Registers value;
  __builtin_memcpy(&value, p, sizeof(value));
  return value;
}
template <class Registers, class T>
inline void store_registers(T* p, Registers value) {
  __builtin_memcpy(p, &value, sizeof(value));
}

// A Vec that packs a whole key tile at once.
template <class V>
concept PacksKeyTiles = requires(const bf16* k, bf16* tile) { V::pack_key_tile(k, int64_t{}, tile); };

// Packs 16 tokens of bf16 keys as the columns of their tiles, four tokens and four pairs of dims at a time. `width` is
// a multiple of 8; padding to a whole tile is not written.
template <class V = void>
inline void pack_key_tiles(const bf16* k, int64_t token_stride, int64_t width, bf16* tiles) {
  int64_t d = 0;
  if constexpr (PacksKeyTiles<V>)
    for (; d + kTileDepth <= width; d += kTileDepth) V::pack_key_tile(k + d, token_stride, tiles + d * kTileColumns);
  for (; d < width; d += 8) {
    for (int column = 0; column < kTileColumns; column += 4) {
      Pairx4 pairs[4];
      for (int i = 0; i < 4; ++i) pairs[i] = load_registers<Pairx4>(k + (column + i) * token_stride + d);
      const Pairx4 low01 = __builtin_shufflevector(pairs[0], pairs[1], 0, 4, 1, 5);
      const Pairx4 low23 = __builtin_shufflevector(pairs[2], pairs[3], 0, 4, 1, 5);
      const Pairx4 high01 = __builtin_shufflevector(pairs[0], pairs[1], 2, 6, 3, 7);
      const Pairx4 high23 = __builtin_shufflevector(pairs[2], pairs[3], 2, 6, 3, 7);
      bf16* row = tiles + d / 2 * 32 + column * 2;  // rows of 16 pairs, through all depth tiles
      store_registers(row, __builtin_shufflevector(low01, low23, 0, 1, 4, 5));
      store_registers(row + 32, __builtin_shufflevector(low01, low23, 2, 3, 6, 7));
      store_registers(row + 64, __builtin_shufflevector(high01, high23, 0, 1, 4, 5));
      store_registers(row + 96, __builtin_shufflevector(high01, high23, 2, 3, 6, 7));
    }
  }
}

// Packs 32 tokens of bf16 values as a row of tiles: a tile row interleaves two tokens. `width` is a multiple of 8.
inline void pack_value_tiles(const bf16* v, int64_t token_stride, int64_t width, bf16* tiles) {
  for (int depth = 0; depth < kTileDepth; depth += 2, v += 2 * token_stride) {
    for (int64_t d = 0; d < width; d += 8) {
      const Bf16x8 even = load_registers<Bf16x8>(v + d), odd = load_registers<Bf16x8>(v + token_stride + d);
      bf16* row = tiles + d / kTileColumns * kTileElements + depth / 2 * 32 + d % kTileColumns * 2;
      store_registers(row, __builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11));
      store_registers(row + 8, __builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15));
    }
  }
}

}  // namespace
}  // namespace tilewright
