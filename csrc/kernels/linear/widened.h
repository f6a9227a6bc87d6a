// Products with byte weights and x that is not rounded. Include after base/quads of the level.
//
// A byte, fp8 or an integer, is converted to bf16 of the same value, in the cache, a few tiles before it is multiplied:
// memory is read at 8 bits. The sum of a group, in fp32, enters the output as fma(sum, scale, output), in order of
// groups: only x is rounded, to the model's type.
#pragma once

#include "base/dot.h"
#include "base/scratch.h"
#include "kernels/linear/epilogue.h"

namespace tilewright {
namespace {

// Rows whose sums are held at a time: a multiple of those that registers hold, at any level.
inline constexpr int kRowsAtOnce = 96;
// Tiles of depth converted to bf16 at a time if few rows use them: 8 KB, which stay in the L1 cache.
inline constexpr int kWidenedTiles = 4;

// Converts `count` bytes, whole rows of tiles, to bf16.
inline void widen_bytes(WeightFormat format, const uint8_t* bytes, int64_t count, bf16* wide) {
  if (format == WeightFormat::fp8)
    for (int64_t i = 0; i < count; i += 32) widen_fp8(bytes + i, wide + i);
  else
    for (int64_t i = 0; i < count; i += 32) widen_int8(reinterpret_cast<const int8_t*>(bytes + i), wide + i);
}
inline void widen_bytes(WeightFormat format, const uint8_t* bytes, int64_t count, float* wide) {
  alignas(64) bf16 tile[kTileElements];
  for (int64_t i = 0; i < count; i += kTileElements) {
    widen_bytes(format, bytes + i, kTileElements, tile);
    widen_tile(tile, wide + i);
  }
}

// Bytes as an operand of multiply_tiles, which finds these functions by their type: fp32 products of few rows read
// weights directly from memory.
struct Fp8Byte {
  uint8_t bits;
};
struct Int8Byte {
  uint8_t bits;
};
inline void load_pair_of(const Fp8Byte* p, Vec& even, Vec& odd) { load_fp8_pair(&p->bits, even, odd); }
inline void load_pair_of(const Int8Byte* p, Vec& even, Vec& odd) { load_int8_pair(&p->bits, even, odd); }
template <class Byte>
inline constexpr bool kIsByte = std::is_same_v<Byte, Fp8Byte> || std::is_same_v<Byte, Int8Byte>;

template <class Byte>
  requires kIsByte<Byte>
inline void load_columns(const Byte* row, int column, Vec& even, Vec& odd) {
  load_pair_of(row + 2 * column, even, odd);
}
template <int kParity, class Byte>
  requires kIsByte<Byte>
inline Vec load_depth(const Byte* row, int column) {
  Vec even, odd;
  load_pair_of(row + 2 * column, even, odd);
  return kParity ? odd : even;
}
// A line is two rows of pairs.
template <int kRows, class Byte, int kTiles>
  requires kIsByte<Byte>
TILEWRIGHT_INLINE void prefetch_pair(const Byte* const (&b)[kTiles], int pair) {
  if (pair % 2 == 0)
    for (int t = 0; t < kTiles; ++t) __builtin_prefetch(b[t] + pair * 32 + DotTraits::kPrefetchBytes);
}

// c [rows, 32] = or += the sums of a group, times the scales of its columns.
inline void add_scaled(const PackedWeight& weight, int64_t strip, int64_t group, const float* sums, int rows,
                       float* c) {
  const float* scales = reinterpret_cast<const float*>(weight.scales_at(strip, group));
  for (int column = 0; column < kStripColumns; column += Vec::kLanes) {
    const Vec scale = Vec::load(scales + column);
    for (int i = column; i < rows * kStripColumns; i += kStripColumns)
      fma(Vec::load(sums + i), scale, group == 0 ? Vec::zero() : Vec::load(c + i)).store(c + i);
  }
}

// Multiplies a strip whose bytes are converted to TB: all at once if its tiles are reused, else a few at a time.
template <class TB, class Left>
void multiply_widened(const LinearArgs& args, const Left* x, int64_t row_begin, int64_t row_end, bool at_once,
                      int64_t strip, TB* wide) {
  const PackedWeight& weight = args.weight;
  const uint8_t* bytes = weight.strip<uint8_t>(strip);
  const int64_t width = weight.depth();
  constexpr int64_t kStep = 2 * kTileElements;  // of a tile of depth
  alignas(64) float c[kRowsAtOnce * kStripColumns], sums[kRowsAtOnce * kStripColumns];
  if (at_once) widen_bytes(weight.format, bytes, weight.strip_elements(), wide);
  for (int64_t row = row_begin; row < row_end; row += kRowsAtOnce) {
    const int rows = static_cast<int>(row_end - row < kRowsAtOnce ? row_end - row : kRowsAtOnce);
    for (int64_t g = 0; g < weight.num_groups(); ++g) {
      const int64_t first = weight.group_begin(g) / kTileDepth, end = weight.group_end(g) / kTileDepth;
      for (int64_t tile = first; tile < end; tile += kWidenedTiles) {
        const int count = static_cast<int>(end - tile < kWidenedTiles ? end - tile : kWidenedTiles);
        const TB* tiles = at_once ? wide + tile * kStep : wide;
        if (!at_once) {
          for (int64_t line = 0; line < count * kStep; line += 64)
            __builtin_prefetch(bytes + tile * kStep + line + DotTraits::kPrefetchBytes);
          widen_bytes(weight.format, bytes + tile * kStep, count * kStep, wide);
        }
        multiply_tiles<TB>(x + row * width + tile * kTileDepth, width, rows, StripTiles<TB>{tiles}, 2, count, sums,
                           kStripColumns, tile > first);
      }
      add_scaled(weight, strip, g, sums, rows, c);
    }
    finish_block(args, c, row, rows, strip);
  }
}

// Multiplies up to kDotRows rows, whose sums are in registers: each byte is converted to fp32 once, when loaded.
template <class Byte>
void multiply_bytes(const LinearArgs& args, const float* x, int64_t row, int rows, int64_t strip) {
  const PackedWeight& weight = args.weight;
  const auto* bytes = static_cast<const Byte*>(static_cast<const void*>(weight.strip<uint8_t>(strip)));
  alignas(64) float c[kDotRows * kStripColumns], sums[kDotRows * kStripColumns];
  for (int64_t g = 0; g < weight.num_groups(); ++g) {
    const int64_t first = weight.group_begin(g) / kTileDepth, end = weight.group_end(g) / kTileDepth;
    const StripTiles<Byte> tiles = {bytes + first * 2 * kTileElements};
    multiply_tiles<Byte>(x + row * weight.depth() + first * kTileDepth, weight.depth(), rows, tiles, 2,
                         static_cast<int>(end - first), sums, kStripColumns);
    add_scaled(weight, strip, g, sums, rows, c);
  }
  finish_block(args, c, row, rows, strip);
}

template <class TB, class Left>
void widened_run_as(const LinearArgs& args, const void* packed_x, int64_t block_begin, int64_t block_end,
                    int64_t strip_begin, int64_t strip_end) {
  const int64_t begin = block_begin * kRowBlock, end = end_row(args, block_end);
  const bool at_once = end - begin > kRowsAtOnce;
  const int64_t tiles = at_once ? args.weight.num_depth_tiles() : kWidenedTiles;
  TB* wide = static_cast<TB*>(thread_scratch(static_cast<size_t>(tiles * 2 * kTileElements) * sizeof(TB)));
  for (int64_t s = strip_begin; s < strip_end; ++s)
    multiply_widened(args, static_cast<const Left*>(packed_x), begin, end, at_once, s, wide);
}

template <bool kBf16Products>
void widened_run(const LinearArgs& args, const void* packed_x, int64_t block_begin, int64_t block_end,
                 int64_t strip_begin, int64_t strip_end) {
  if constexpr (kBf16Products) {
    if (bf16_products(args))
      return widened_run_as<bf16, bf16>(args, packed_x, block_begin, block_end, strip_begin, strip_end);
  }
  const int64_t row = block_begin * kRowBlock;
  if (args.m - row <= kDotRows) {
    const auto run = [&](auto byte) {
      for (int64_t s = strip_begin; s < strip_end; ++s)
        multiply_bytes<decltype(byte)>(args, static_cast<const float*>(packed_x), row, static_cast<int>(args.m - row),
                                       s);
    };
    return args.weight.format == WeightFormat::fp8 ? run(Fp8Byte{}) : run(Int8Byte{});
  }
  // fp32 products: as in generic.h, tiles of fp32 pay off if enough rows use them.
  if ((block_end - block_begin) * kRowBlock >= kRowsToWiden && args.m >= kRowsToWiden)
    widened_run_as<float, float>(args, packed_x, block_begin, block_end, strip_begin, strip_end);
  else
    widened_run_as<bf16, float>(args, packed_x, block_begin, block_end, strip_begin, strip_end);
}

}  // namespace
}  // namespace tilewright
