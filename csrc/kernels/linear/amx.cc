#include "base/x86/amx.h"

#include "base/quads/avx512.h"
#include "base/vec/avx512.h"
#include "kernels/level.h"
#include "kernels/linear/generic.h"

namespace tilewright {
namespace {

// A block of x as A tiles: [2 row tiles][depth tiles][16 rows][32]. Read directly from x, rows a multiple of 4 KB apart
// would all map to one set of L1.
void pack_block_tiles(const LinearArgs& args, int64_t block, bf16* packed) {
  const int64_t depth_tiles = args.weight.num_depth_tiles();
  const int64_t whole = args.weight.k / kTileDepth;
  for (int r = 0; r < rows_in_block(args, block); ++r) {
    const bf16* x = row_of_x<bf16>(args, block * kRowBlock + r);
    bf16* row = packed + (r / 16 * depth_tiles * 16 + r % 16) * kTileDepth;
    for (int64_t d = 0; d < whole; ++d)
      _mm512_storeu_si512(row + d * kTileElements, _mm512_loadu_si512(x + d * kTileDepth));
    if (whole < depth_tiles) {
      const __mmask32 tail = static_cast<__mmask32>((uint64_t{1} << (args.weight.k - whole * kTileDepth)) - 1);
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

// Lines of the next strip, prefetched while this one is multiplied: equally many at each tile step, from `line` on.
struct NextStrip {
  const bf16* line;
  int lines_per_step;
};

// Multiplies one block of rows by one strip, over `count` tiles of depth from `begin`; adds to c except for the first
// ones.
void multiply_depths(const bf16* x, int rows, int64_t depth_tiles, const bf16* strip, int begin, int count,
                     NextStrip next, float* c) {
  const LeftTiles left = {x + begin * kTileElements, kTileDepth, kTileElements, depth_tiles * kTileElements, true};
  auto tile_at = [&](int d, int j) { return strip + ((begin + d) * 2 + j) * kTileElements; };
  if (rows > 16) {
    // Past the strip's end this reaches the next strip, which is multiplied next.
    auto fetch = [&](int d, int j) {
      prefetch_tile(tile_at(d + 2, j));
      for (int line = 0; line < next.lines_per_step; ++line, next.line += 32) __builtin_prefetch(next.line, 0, 2);
    };
    begin ? multiply_columns<2, true>(left, rows, count, tile_at, fetch, c, kStripColumns)
          : multiply_columns<2, false>(left, rows, count, tile_at, fetch, c, kStripColumns);
  } else {
    // Few rows: the weights come from memory, at full speed if they are prefetched 16 KB ahead.
    auto fetch = [&](int d, int j) { prefetch_tile<2>(tile_at(d + 8, j)); };
    begin ? multiply_columns<2, true>(left, rows, count, tile_at, fetch, c, kStripColumns)
          : multiply_columns<2, false>(left, rows, count, tile_at, fetch, c, kStripColumns);
  }
}

// Strips whose sums are kept over all of the depth: 8 strips by 8 blocks of 4 KB are an eighth of L2.
constexpr int64_t kStripBatch = 8;

// All blocks of rows against a few strips, by chunks of depth: the chunk of x stays in L2 for all strips.
void run_batch(const LinearArgs& args, const bf16* packed_x, int64_t block_begin, int64_t block_end,
               int64_t strip_begin, int64_t strip_end, bool fetch_next, float* sums, TileScope& tiles) {
  const int depth_tiles = static_cast<int>(args.weight.num_depth_tiles());
  const int64_t strip_elements = int64_t{depth_tiles} * 2 * kTileElements;  // also of a block of x
  // A strip is 16 lines for each of its tile steps: the blocks of rows share the prefetch of the next one.
  const int lines = fetch_next ? static_cast<int>(ceil_div(16, block_end - block_begin)) : 0;
  for (int begin = 0; begin < depth_tiles; begin += kDepthChunk) {
    const int count = depth_tiles - begin < kDepthChunk ? depth_tiles - begin : kDepthChunk;
    float* c = sums;
    for (int64_t s = strip_begin; s < strip_end; ++s) {
      const bf16* strip = args.weight.strip<bf16>(s);
      for (int64_t block = block_begin; block < block_end; ++block, c += kRowBlock * kStripColumns) {
        const int rows = rows_in_block(args, block);
        tiles.set_rows(rows);
        const int64_t steps_before = ((block - block_begin) * depth_tiles + begin) * 2;
        const NextStrip next = {strip + strip_elements + steps_before * lines * 32, lines};
        multiply_depths(packed_x + block * strip_elements, rows, depth_tiles, strip, begin, count, next, c);
        if (begin + count == depth_tiles) finish_block(args, c, block * kRowBlock, rows, s);
      }
    }
  }
}

// From this number of rows on tiles are faster than vectors, if groups are at least as deep. On 16 cores 8 rows take
// 1.5 times as long by vectors as 16 by tiles; with nibbles, which tiles need widened, 0.9 times (12288 x 4096, groups
// of 64 and 128).
constexpr int64_t kByteRowsToTiles = 5, kNibbleRowsToTiles = 10;

bool by_byte_tiles(const LinearArgs& args) {
  const PackedWeight& weight = args.weight;
  return rounds_x(weight.format) && args.m >= (has_nibbles(weight.format) ? kNibbleRowsToTiles : kByteRowsToTiles) &&
         (weight.group_size == 0 || has_steps(weight.format) || weight.group_size % kQuadTileDepth == 0);
}

// Widens the nibbles of a strip to tiles of bytes: the codes, or their table values.
void widen_nibbles(const uint8_t* strip, int64_t num_tiles, const int8_t* table, int8_t* wide) {
  const __m512i low_half = _mm512_set1_epi8(15);
  const __m512i quants =
      _mm512_broadcast_i32x4(table ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(table))
                                   : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  for (int64_t line = 0; line < num_tiles * 8; ++line) {
    const __m512i bytes = _mm512_loadu_si512(strip + line * 64);
    const __m512i upper = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low_half);
    _mm512_storeu_si512(wide + line * 128, _mm512_shuffle_epi8(quants, _mm512_and_si512(bytes, low_half)));
    _mm512_storeu_si512(wide + line * 128 + 64, _mm512_shuffle_epi8(quants, upper));
  }
}

// c [rows, 32] += the scaled sums of a group, or = for the first one: the arithmetic of quantized.h. This takes as long
// as the products if groups are as deep as tiles, so format differences are template arguments.
template <bool kIsFirst, bool kHasBias, bool kHasMins>
void add_sums_of(const PackedWeight& weight, int64_t strip, int64_t group, const char* x, int64_t row_bytes, int rows,
                 const int32_t* sums, float* c) {
  const char* scales = weight.scales_at(strip, group);
  const int bias = traits_of(weight.format).bias;
  const bool is_half = weight.scale_dtype() == DType::f16;
  const QuantizedRow first_row(weight, x);
  const char* x_scales = reinterpret_cast<const char*>(first_row.scales + group);
  const char* x_sums = reinterpret_cast<const char*>(first_row.sums + group);
  const Vec scales_0 = load_scales(scales, is_half, 0), scales_1 = load_scales(scales, is_half, Vec::kLanes);
  const Vec mins_0 = kHasMins ? load_mins(weight, scales, is_half, 0, scales_0) : Vec::zero();
  const Vec mins_1 = kHasMins ? load_mins(weight, scales, is_half, Vec::kLanes, scales_1) : Vec::zero();
  for (int r = 0; r < rows; ++r, x_scales += row_bytes, x_sums += row_bytes) {
    const float x_scale = *reinterpret_cast<const float*>(x_scales);
    const int32_t x_sum = kHasBias || kHasMins ? *reinterpret_cast<const int32_t*>(x_sums) : 0;
    const auto add = [&](int column, Vec weight_scales, Vec mins) __attribute__((always_inline)) {
      __m512i exact = _mm512_loadu_si512(sums + r * kStripColumns + column);
      if constexpr (kHasBias) exact = _mm512_sub_epi32(exact, _mm512_set1_epi32(bias * x_sum));
      float* out = c + r * kStripColumns + column;
      Vec total = add_group({exact}, x_scale, weight_scales, kIsFirst ? Vec::zero() : Vec::load(out));
      if constexpr (kHasMins) total = subtract_min(mins, x_scale, x_sum, total);
      total.store(out);
    };
    add(0, scales_0, mins_0);
    add(Vec::kLanes, scales_1, mins_1);
  }
}

void add_sums(const PackedWeight& weight, int64_t strip, int64_t group, const char* x, int64_t row_bytes, int rows,
              const int32_t* sums, float* c) {
  const auto run = [&](auto has_bias, auto has_min) {
    constexpr bool kHasBias = decltype(has_bias)::value, kHasMins = decltype(has_min)::value;
    group == 0 ? add_sums_of<true, kHasBias, kHasMins>(weight, strip, group, x, row_bytes, rows, sums, c)
               : add_sums_of<false, kHasBias, kHasMins>(weight, strip, group, x, row_bytes, rows, sums, c);
  };
  if (has_mins(weight.format)) return run(std::false_type{}, std::true_type{});
  if (traits_of(weight.format).bias) return run(std::true_type{}, std::false_type{});
  run(std::false_type{}, std::false_type{});
}

// Multiplies one block of rows by one strip, whose bytes are `tiles`.
void multiply_byte_tiles(const PackedWeight& weight, int64_t strip, const int8_t* tiles, const char* x,
                         int64_t row_bytes, int rows, float* c) {
  alignas(64) int32_t sums[kRowBlock * kStripColumns];
  for (int64_t g = 0; g < weight.num_groups(); ++g) {
    const int begin = static_cast<int>(weight.group_begin(g) / kQuadTileDepth);
    const int end = static_cast<int>(weight.group_end(g) / kQuadTileDepth);
    const auto left = LeftTilesOf<int8_t>::row_major(
        reinterpret_cast<const int8_t*>(x) + int64_t{begin} * kQuadTileDepth, row_bytes, true);
    const auto tile_at = [&](int d, int j) { return tiles + ((int64_t{begin} + d) * 2 + j) * kQuadTileBytes<8>; };
    const auto fetch = [&](int d, int j) { prefetch_tile(tile_at(d + 2, j)); };
    multiply_columns<2>(left, rows, end - begin, tile_at, fetch, sums, kStripColumns);
    add_sums(weight, strip, g, x, row_bytes, rows, sums, c);
  }
}

void run_byte_tiles(const LinearArgs& args, const void* packed_x, int64_t block_begin, int64_t block_end,
                    int64_t strip_begin, int64_t strip_end) {
  const PackedWeight& weight = args.weight;
  const int64_t row_bytes = quantized_row_bytes(weight);
  const bool with_steps = has_steps(weight.format), nibbles = has_nibbles(weight.format);
  int8_t* wide = nibbles ? static_cast<int8_t*>(thread_scratch(weight.depth() * kStripColumns)) : nullptr;
  alignas(64) float c[kRowBlock * kStripColumns];
  TileScope tiles(rows_in_block(args, block_begin));
  for (int64_t s = strip_begin; s < strip_end; ++s) {
    const PackedWeight own = with_steps ? strip_as_bytes(weight, s, reinterpret_cast<uint8_t*>(wide)) : weight;
    if (nibbles && !with_steps)
      widen_nibbles(weight.strip<uint8_t>(s), weight.num_depth_tiles() * 2, traits_of(weight.format).table, wide);
    const int8_t* bytes = nibbles ? wide : weight.strip<int8_t>(s);
    for (int64_t block = block_begin; block < block_end; ++block) {
      const int rows = rows_in_block(args, block);
      tiles.set_rows(rows);
      multiply_byte_tiles(own, with_steps ? 0 : s, bytes,
                          static_cast<const char*>(packed_x) + block * kRowBlock * row_bytes, row_bytes, rows, c);
      finish_block(args, c, block * kRowBlock, rows, s);
    }
  }
}

// Converts bytes to bf16, a strip at a time, for all blocks of rows.
void run_widened(const LinearArgs& args, const bf16* packed_x, int64_t block_begin, int64_t block_end,
                 int64_t strip_begin, int64_t strip_end) {
  const PackedWeight& weight = args.weight;
  const int64_t depth_tiles = weight.num_depth_tiles(), block_elements = depth_tiles * 2 * kTileElements;
  bf16* wide = static_cast<bf16*>(thread_scratch(static_cast<size_t>(block_elements) * sizeof(bf16)));
  alignas(64) float c[kRowBlock * kStripColumns], sums[kRowBlock * kStripColumns];
  TileScope tiles(rows_in_block(args, block_begin));
  for (int64_t s = strip_begin; s < strip_end; ++s) {
    widen_bytes(weight.format, weight.strip<uint8_t>(s), weight.strip_elements(), wide);
    for (int64_t block = block_begin; block < block_end; ++block) {
      const int rows = rows_in_block(args, block);
      tiles.set_rows(rows);
      for (int64_t g = 0; g < weight.num_groups(); ++g) {
        const int64_t first = weight.group_begin(g) / kTileDepth;
        const int count = static_cast<int>(weight.group_end(g) / kTileDepth - first);
        const LeftTiles left = {packed_x + block * block_elements + first * kTileElements, kTileDepth, kTileElements,
                                depth_tiles * kTileElements, true};
        const auto tile_at = [&](int d, int j) { return wide + ((first + d) * 2 + j) * kTileElements; };
        const auto fetch = [&](int d, int j) { prefetch_tile(tile_at(d + 2, j)); };
        multiply_columns<2>(left, rows, count, tile_at, fetch, sums, kStripColumns);
        add_scaled(weight, s, g, sums, rows, c);
      }
      finish_block(args, c, block * kRowBlock, rows, s);
    }
  }
}

void run(const LinearArgs& args, const void* packed_x, int64_t block_begin, int64_t block_end, int64_t strip_begin,
         int64_t strip_end) {
  if (by_byte_tiles(args)) return run_byte_tiles(args, packed_x, block_begin, block_end, strip_begin, strip_end);
  if (!bf16_products(args)) return linear_run<false>(args, packed_x, block_begin, block_end, strip_begin, strip_end);
  if (is_widened(args.weight.format))
    return run_widened(args, static_cast<const bf16*>(packed_x), block_begin, block_end, strip_begin, strip_end);
  // One chunk needs no batch, and one block of rows no chunks: weights then pass once, in one stream.
  const bool one_pass = block_end - block_begin == 1 || args.weight.num_depth_tiles() <= kDepthChunk;
  const int64_t batch = one_pass ? 1 : kStripBatch;
  float* sums = static_cast<float*>(
      thread_scratch(batch * (block_end - block_begin) * kRowBlock * kStripColumns * sizeof(float)));
  TileScope tiles(rows_in_block(args, block_begin));
  for (int64_t s = strip_begin; s < strip_end; s += batch)
    run_batch(args, static_cast<const bf16*>(packed_x), block_begin, block_end, s,
              s + batch < strip_end ? s + batch : strip_end, batch == 1 && s + 1 < strip_end, sums, tiles);
}

}  // namespace

TILEWRIGHT_KERNELS(linear, LinearKernels) = {kTileProduct.text, WeightLayout::tiles, linear_block_bytes, pack_block,
                                             run};

}  // namespace tilewright
