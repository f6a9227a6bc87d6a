// Linear on bfmmla: two rows of x by two columns, four depths at a time; and on smmla, eight bytes at a time.
//
// The result of bfmmla is that of two bfdot, pair after pair of depths, so that a row has the same bits whether it is
// multiplied by bfdot, alone, or here with others. Sums of products of bytes are exact.
#include "kernels/level.h"

#include TILEWRIGHT_VEC
#include TILEWRIGHT_QUADS

#include "kernels/linear/generic.h"

namespace tilewright {
namespace {

// From here on packing the operands in fours costs less than bfmmla saves.
constexpr int64_t kRowsToMatrix = 8;

bool by_matrix(const LinearArgs& args) {
  return bf16_products(args) && !is_quantized(args.weight.format) && args.m >= kRowsToMatrix;
}

// Packs a block of x as [pairs of rows][depth / 4][2 rows][4]: 16 bytes are an operand. A last odd row is paired with
// zeros.
void pack_block(const LinearArgs& args, int64_t block, void* packed) {
  if (!by_matrix(args)) return linear_pack_block(args, block, packed);
  const int64_t width = args.weight.num_depth_tiles() * kTileDepth;
  const int rows = rows_in_block(args, block);
  uint16_t* to = static_cast<uint16_t*>(packed);
  for (int r = 0; r < rows; r += 2, to += 2 * width) {
    const bf16* even = row_of_x<bf16>(args, block * kRowBlock + r);
    const bf16* odd = r + 1 < rows ? row_of_x<bf16>(args, block * kRowBlock + r + 1) : nullptr;
    const uint16x4_t zero = vdup_n_u16(0);
    int64_t i = 0;
    for (; i + 4 <= args.weight.k; i += 4)
      vst1q_u16(to + 2 * i, vcombine_u16(Vec::raw(even + i), odd ? Vec::raw(odd + i) : zero));
    for (; i < width; i += 4)
      for (int d = 0; d < 4; ++d) {
        to[2 * i + d] = i + d < args.weight.k ? even[i + d].bits : 0;
        to[2 * i + 4 + d] = odd && i + d < args.weight.k ? odd[i + d].bits : 0;
      }
  }
}

constexpr int kSlabColumns = 8;
constexpr int kSlabRow = kSlabColumns * 4;  // elements of a slab for four depths

// Packs a strip of weights as [slabs of 8 columns][depth / 4][8 columns][4]. Two pair rows of a tile hold four depths,
// and zipping them pair by pair reorders them.
void make_slabs(const bf16* strip, int64_t depth_tiles, bf16* slabs) {
  const int64_t slab_elements = depth_tiles * kTileDepth * kSlabColumns;
  for (int64_t d = 0; d < depth_tiles; ++d)
    for (int column = 0; column < kStripColumns; column += kSlabColumns) {
      const bf16* tile = strip + (d * 2 + column / kTileColumns) * kTileElements + column % kTileColumns * 2;
      auto* to =
          reinterpret_cast<uint32_t*>(slabs + column / kSlabColumns * slab_elements + d * kTileDepth / 4 * kSlabRow);
      for (int row = 0; row < kTileElements; row += 64, to += kSlabRow / 2)
        for (int half = 0; half < 2; ++half) {
          const auto* pairs = reinterpret_cast<const uint32_t*>(tile + row + half * 8);
          const uint32x4_t first = vld1q_u32(pairs), second = vld1q_u32(pairs + kTileColumns);
          vst1q_u32(to + half * 8, vzip1q_u32(first, second));
          vst1q_u32(to + half * 8 + 4, vzip2q_u32(first, second));
        }
    }
}

// c [2 kPairs, 8] of stride 32: 4 x 4 sums of 2 x 2, beside four operands of either side in 32 registers.
template <int kPairs>
void multiply_slab(const bf16* x, int64_t pair_stride, const bf16* slab, int64_t depth, float* c) {
  const auto load = [](const bf16* p) { return PairVec::load(p).v; };
  float32x4_t sums[kPairs][4];
  for (auto& row : sums)
    for (float32x4_t& sum : row) sum = vdupq_n_f32(0.0f);
  for (int64_t d = 0; d < depth; d += 4, x += 8, slab += kSlabRow) {
    bfloat16x8_t columns[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) columns[i] = load(slab + 8 * i);
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
      const bfloat16x8_t rows = load(x + p * pair_stride);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[p][i] = vbfmmlaq_f32(sums[p][i], rows, columns[i]);
    }
  }
  for (int p = 0; p < kPairs; ++p)
    for (int i = 0; i < 4; i += 2) {
      const float64x2_t left = vreinterpretq_f64_f32(sums[p][i]), right = vreinterpretq_f64_f32(sums[p][i + 1]);
      float* even = c + 2 * p * kStripColumns + 2 * i;
      vst1q_f32(even, vreinterpretq_f32_f64(vzip1q_f64(left, right)));
      vst1q_f32(even + kStripColumns, vreinterpretq_f32_f64(vzip2q_f64(left, right)));
    }
}

constexpr int kPairsAtOnce = 4;
constexpr ProductName kMatrixProduct = {"bf16_bf16_fp32", 2 * kPairsAtOnce, kSlabColumns, 4};

// Multiplies rows from row_begin on, a slab at a time: it stays in the L1 cache for all of them.
void multiply_rows(const LinearArgs& args, const bf16* x, const bf16* slabs, int64_t row_begin, int rows, float* c) {
  const int64_t depth = args.weight.num_depth_tiles() * kTileDepth, pair_stride = 2 * depth;
  for (int column = 0; column < kStripColumns; column += kSlabColumns)
    for (int row = 0; row < rows; row += 2 * kPairsAtOnce) {
      const int pairs = (rows - row + 1) / 2;
      with_rows<kPairsAtOnce>(pairs < kPairsAtOnce ? pairs : kPairsAtOnce, [&](auto num_pairs) {
        multiply_slab<num_pairs.value>(x + (row_begin + row) / 2 * pair_stride, pair_stride, slabs + column * depth,
                                       depth, c + row * kStripColumns + column);
      });
    }
}

bool by_byte_matrix(const LinearArgs& args) { return rounds_x(args.weight.format) && args.m >= kRowsToMatrix; }

// Packs a strip of bytes or nibbles as [slabs of 8 columns][depth / 8][8 columns][8]: two rows of quads, zipped; for
// nibbles their table values, if there is a table.
template <bool kNibbles>
void make_byte_slabs(const PackedWeight& weight, int64_t strip, uint8_t* slabs) {
  const int64_t slab_bytes = weight.depth() * kSlabColumns;
  const uint8_t* data = weight.strip<uint8_t>(strip);
  const int8_t* table = traits_of(weight.format).table;
  const uint8x16_t values = vreinterpretq_u8_s8(vld1q_s8(table ? table : kMxfp4Values));
  const auto quant_of = [&](uint8x16_t codes) { return table ? vqtbl1q_u8(values, codes) : codes; };
  for (int64_t d = 0; d < weight.depth(); d += 8)
    for (int column = 0; column < kStripColumns; column += 4) {
      const int64_t tile = d / kQuadTileDepth * 2 + column / kTileColumns;
      const int within = quad_offset<kNibbles>(static_cast<int>(d % kQuadTileDepth), column % kTileColumns);
      const uint8_t* from = data + tile * quad_tile_bytes(weight.format) + within;
      const uint8x16_t bytes = vld1q_u8(from);
      const uint32x4_t first = vreinterpretq_u32_u8(kNibbles ? quant_of(vandq_u8(bytes, vdupq_n_u8(15))) : bytes);
      const uint32x4_t second = vreinterpretq_u32_u8(kNibbles ? quant_of(vshrq_n_u8(bytes, 4)) : vld1q_u8(from + 64));
      uint8_t* to = slabs + column / kSlabColumns * slab_bytes + (d + column % kSlabColumns) * kSlabColumns;
      vst1q_u8(to, vreinterpretq_u8_u32(vzip1q_u32(first, second)));
      vst1q_u8(to + 16, vreinterpretq_u8_u32(vzip2q_u32(first, second)));
    }
}

// c [2 kPairs, 8] of stride 32, the columns of a strip from `column` on. The last row is repeated if there is no
// second.
template <int kPairs>
void multiply_byte_slab(const PackedWeight& weight, int64_t strip, int column, const int8_t* slab, const char* x,
                        int64_t row_bytes, int rows, float* c) {
  const char* row_at[2 * kPairs];
  for (int r = 0; r < 2 * kPairs; ++r) row_at[r] = x + (r < rows ? r : rows - 1) * row_bytes;
  const bool is_half = weight.scale_dtype() == DType::f16;
  const int bias = traits_of(weight.format).bias;  // of the bytes that are multiplied
  for (int64_t g = 0; g < weight.num_groups(); ++g) {
    int32x4_t sums[kPairs][4];
    for (auto& row : sums)
      for (int32x4_t& sum : row) sum = vdupq_n_s32(0);
    for (int64_t d = weight.group_begin(g); d < weight.group_end(g); d += 8) {
      int8x16_t columns[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) columns[i] = vld1q_s8(slab + d * kSlabColumns + 16 * i);
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) {
        const auto load = [&](int r) { return vld1_s8(reinterpret_cast<const int8_t*>(row_at[r]) + d); };
        const int8x16_t both = vcombine_s8(load(2 * p), load(2 * p + 1));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[p][i] = vmmlaq_s32(sums[p][i], both, columns[i]);
      }
    }
    const char* scales = weight.scales_at(strip, g);
    for (int i = 0; i < 4; i += 2) {
      const Vec weight_scales = load_scales(scales, is_half, column + 2 * i);
      const Vec mins = load_mins(weight, scales, is_half, column + 2 * i, weight_scales);
      for (int r = 0; r < 2 * kPairs; ++r) {
        const QuantizedRow row(weight, row_at[r]);
        const int64x2_t left = vreinterpretq_s64_s32(sums[r / 2][i]), right = vreinterpretq_s64_s32(sums[r / 2][i + 1]);
        const int32x4_t all = vreinterpretq_s32_s64(r % 2 ? vzip2q_s64(left, right) : vzip1q_s64(left, right));
        float* out = c + r * kStripColumns + 2 * i;
        const IntVec exact = {vsubq_s32(all, vdupq_n_s32(bias * row.sums[g]))};
        Vec total = add_group(exact, row.scales[g], weight_scales, g == 0 ? Vec::zero() : Vec::load(out));
        if (has_mins(weight.format)) total = subtract_min(mins, row.scales[g], row.sums[g], total);
        total.store(out);
      }
    }
  }
}

void run_bytes(const LinearArgs& args, const void* packed_x, int64_t block_begin, int64_t block_end,
               int64_t strip_begin, int64_t strip_end) {
  const PackedWeight& weight = args.weight;
  const int64_t row_bytes = quantized_row_bytes(weight), slab_bytes = weight.depth() * kSlabColumns;
  // Bytes of a strip with steps, before its slabs.
  const int64_t wide_bytes = has_steps(weight.format) ? weight.depth() * kStripColumns : 0;
  uint8_t* wide = static_cast<uint8_t*>(thread_scratch(wide_bytes + weight.depth() * kStripColumns));
  uint8_t* slabs = wide + wide_bytes;
  alignas(64) float c[kRowBlock * kStripColumns];
  for (int64_t s = strip_begin; s < strip_end; ++s) {
    const PackedWeight own = wide_bytes ? strip_as_bytes(weight, s, wide) : weight;
    const int64_t strip = wide_bytes ? 0 : s;
    has_nibbles(own.format) ? make_byte_slabs<true>(own, strip, slabs) : make_byte_slabs<false>(own, strip, slabs);
    for (int64_t block = block_begin; block < block_end; ++block) {
      const int rows = rows_in_block(args, block);
      const char* x = static_cast<const char*>(packed_x) + block * kRowBlock * row_bytes;
      for (int column = 0; column < kStripColumns; column += kSlabColumns)
        for (int row = 0; row < rows; row += 8)
          with_rows<4>((rows - row + 1) / 2 < 4 ? (rows - row + 1) / 2 : 4, [&](auto num_pairs) {
            multiply_byte_slab<num_pairs.value>(
                own, strip, column, reinterpret_cast<const int8_t*>(slabs) + column / kSlabColumns * slab_bytes,
                x + row * row_bytes, row_bytes, rows - row, c + row * kStripColumns + column);
          });
      finish_block(args, c, block * kRowBlock, rows, s);
    }
  }
}

void run(const LinearArgs& args, const void* packed_x, int64_t block_begin, int64_t block_end, int64_t strip_begin,
         int64_t strip_end) {
  if (by_byte_matrix(args)) return run_bytes(args, packed_x, block_begin, block_end, strip_begin, strip_end);
  if (!by_matrix(args)) return linear_run(args, packed_x, block_begin, block_end, strip_begin, strip_end);
  bf16* slabs = static_cast<bf16*>(thread_scratch(args.weight.strip_elements() * sizeof(bf16)));
  const int64_t end = end_row(args, block_end);
  alignas(64) float c[kRowsAtOnce * kStripColumns];
  for (int64_t s = strip_begin; s < strip_end; ++s) {
    make_slabs(args.weight.strip<bf16>(s), args.weight.num_depth_tiles(), slabs);
    for (int64_t row = block_begin * kRowBlock; row < end; row += kRowsAtOnce) {
      const int rows = static_cast<int>(end - row < kRowsAtOnce ? end - row : kRowsAtOnce);
      multiply_rows(args, static_cast<const bf16*>(packed_x), slabs, row, rows, c);
      finish_block(args, c, row, rows, s);
    }
  }
}

}  // namespace

TILEWRIGHT_KERNELS(linear, LinearKernels) = {kMatrixProduct.text, WeightLayout::tiles, linear_block_bytes, pack_block,
                                             run};
}  // namespace tilewright
