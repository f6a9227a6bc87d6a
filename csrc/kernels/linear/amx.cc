#include "base/amx.h"

#include <algorithm>
#include <cstring>

#include "base/vec/avx512.h"
#include "kernels/linear/generic.h"

namespace tilewright {
namespace {

// A block of x as A tiles: [2 row tiles][depth tiles][16 rows][32]. Read straight from x, rows a multiple of 4 KB apart
// would all fall into one set of L1.
void pack_block_tiles(const LinearArgs& args, int64_t block, bf16* packed) {
  const int64_t depth_tiles = args.num_depth_tiles();
  const int64_t whole = args.k / kTileDepth;
  for (int r = 0; r < rows_in_block(args, block); ++r) {
    const bf16* x = static_cast<const bf16*>(args.x) + (block * kRowBlock + r) * args.x_stride;
    bf16* row = packed + (r / 16 * depth_tiles * 16 + r % 16) * kTileDepth;
    for (int64_t d = 0; d < whole; ++d)
      _mm512_storeu_si512(row + d * kTileElements, _mm512_loadu_si512(x + d * kTileDepth));
    if (whole < depth_tiles) {
      const __mmask32 tail = static_cast<__mmask32>((uint64_t{1} << (args.k - whole * kTileDepth)) - 1);
      _mm512_storeu_si512(row + whole * kTileElements, _mm512_maskz_loadu_epi16(tail, x + whole * kTileDepth));
    }
  }
}

void pack_block(const LinearArgs& args, int64_t block, void* packed) {
  if (bf16_products(args))
    pack_block_tiles(args, block, static_cast<bf16*>(packed));
  else
    linear_pack_block(args, block, packed);
}

// One block of rows against one strip.
void multiply_strip_tiles(const bf16* x, int rows, int depth_tiles, const bf16* strip, float* c) {
  const LeftTiles left = {x, kTileDepth, kTileElements, int64_t{depth_tiles} * kTileElements, true};
  auto tile_at = [&](int d, int j) { return strip + (d * 2 + j) * kTileElements; };
  if (rows > 16) {
    // Past the strip's end this reaches the next strip, which is next.
    auto fetch = [&](int d, int j) { prefetch_tile(tile_at(d + 2, j)); };
    return multiply_columns<2>(left, rows, depth_tiles, tile_at, fetch, c, kStripColumns);
  }
  // Few rows: the weights come from memory, at its speed if they are asked for 16 KB ahead.
  auto fetch = [&](int d, int j) { prefetch_tile<2>(tile_at(d + 8, j)); };
  multiply_columns<2>(left, rows, depth_tiles, tile_at, fetch, c, kStripColumns);
}

void run(const LinearArgs& args, const void* packed_x, int64_t block_begin, int64_t block_end, int64_t strip_begin,
         int64_t strip_end) {
  if (!bf16_products(args)) return linear_run(args, packed_x, block_begin, block_end, strip_begin, strip_end);
  const int depth_tiles = static_cast<int>(args.num_depth_tiles());
  const int64_t strip_elements = int64_t{depth_tiles} * 2 * kTileElements;  // also of a block of x
  alignas(64) float c[kRowBlock * kStripColumns];
  TileScope tiles(rows_in_block(args, block_begin));
  for (int64_t s = strip_begin; s < strip_end; ++s) {
    const bf16* strip = static_cast<const bf16*>(args.weight) + s * strip_elements;
    for (int64_t block = block_begin; block < block_end; ++block) {
      const int rows = rows_in_block(args, block);
      tiles.set_rows(rows);
      multiply_strip_tiles(static_cast<const bf16*>(packed_x) + block * strip_elements, rows, depth_tiles, strip, c);
      finish_block(args, c, block * kRowBlock, rows, s);
    }
  }
}

}  // namespace

extern const LinearKernels linear_amx;
const LinearKernels linear_amx = {linear_block_bytes, pack_block, run};

}  // namespace tilewright
