// Products with quantised weights. Include after base/quads of the level.
//
// x is rounded to bytes, row by row and group by group: scale = max |x| / 127, q = round(x / scale). Products of bytes
// are summed in 32 bits, exactly, and a group's sum enters the output as fma(sum * x scale, weight scale, output), in
// order of groups, then its min. So a row has the same bits for every kernel and beside any other rows. With steps, x
// has one scale, and the sums of all groups are added exactly too.
#pragma once

#include "base/dot.h"
#include "base/rotate.h"
#include "base/scratch.h"
#include "base/vec/row.h"
#include "kernels/linear/epilogue.h"

namespace tilewright {
namespace {

// Number of groups of x with their own scale.
inline int64_t num_x_groups(const PackedWeight& weight) { return has_steps(weight.format) ? 1 : weight.num_groups(); }

// A packed row of x: its bytes, padded with zeros to whole tiles, then a scale and the sum of the bytes for each group;
// with steps, one of each for the row, and then the sums of groups. Rows are not a multiple of 4 KB apart, or their
// lines would share a set of the L1 cache.
inline int64_t quantized_row_bytes(const PackedWeight& weight) {
  const int64_t sums = has_steps(weight.format) ? weight.num_groups() : 0;
  const int64_t bytes = round_up(weight.depth() + num_x_groups(weight) * 8 + sums * 4, 64);
  return bytes % 4096 ? bytes : bytes + 64;
}

struct QuantizedRow {
  const int8_t* values;
  const float* scales;
  const int32_t* sums;

  QuantizedRow(const PackedWeight& weight, const void* row)
      : values(static_cast<const int8_t*>(row)),
        scales(reinterpret_cast<const float*>(values + weight.depth())),
        sums(reinterpret_cast<const int32_t*>(scales + num_x_groups(weight))) {}
};

// A group with smaller values counts as zeros: 127 / max would overflow.
inline constexpr float kLeastMax = 1e-30f;

// Rounds `count` values of x to bytes and returns their scale and sum. A NaN or an infinity makes the scale a NaN, and
// with it all outputs of the row.
template <class TX>
inline void quantize_group(const TX* x, int64_t count, int8_t* values, float* scale, int32_t* sum) {
  Vec most = Vec::zero(), broken = Vec::zero();
  for_each_vec(count, [&](int64_t i, auto some) {
    const Vec v = load_some(x + i, some);
    most = max(max(v, Vec::zero() - v), most);
    broken = fma(v, Vec::zero(), broken);
  });
  const float largest = reduce_max(most);
  const bool is_zero = !(largest > kLeastMax);
  const Vec inverse = Vec::set1(is_zero ? 0.0f : 127.0f / largest);
  Vec total = Vec::zero();
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    const Vec v = round((i + Vec::kLanes <= count ? Vec::load(x + i) : Vec::load(x + i, count - i)) * inverse);
    total = total + v;
    store_bytes(v, values + i);
  }
  *scale = (is_zero ? 0.0f : largest / 127.0f) + reduce_add(broken);
  const float whole = reduce_add(total);  // exact: below 2^24
  *sum = whole == whole ? static_cast<int32_t>(whole) : 0;
}

// Returns a row of x with its columns in the weight's order, and rotated if the weight is.
template <class TX>
inline const float* as_weight(const LinearArgs& args, const TX* x, float* row) {
  const PackedWeight& weight = args.weight;
  if (args.x_columns)
    for (int64_t i = 0; i < weight.k; ++i) row[i] = to_float(x[args.x_columns[i]]);
  else
    for_each_vec(weight.k, [&](int64_t i, auto some) { store_some(load_some(x + i, some), row + i, some); });
  if (!is_rotated(weight.format)) return row;
  std::memset(row + weight.k, 0, static_cast<size_t>(weight.depth() - weight.k) * sizeof(float));
  rotate(row, weight.depth());
  return row;
}

// fn(row of x), with the weight's column order and rotation if it has any.
template <class TX, class Fn>
inline void with_columns(const LinearArgs& args, const TX* x, Fn fn) {
  if (!args.x_columns && !is_rotated(args.weight.format)) return fn(x);
  fn(as_weight(args, x, static_cast<float*>(thread_scratch(static_cast<size_t>(args.weight.depth()) * sizeof(float)))));
}

inline void add_up_groups(const PackedWeight& weight, const int8_t* values, int32_t* sums) {
  const int size = static_cast<int>(weight.group_size);
  for (int64_t g = 0; g < weight.num_groups(); ++g, values += size) {
    int32_t sum = 0;
    for (int i = 0; i < size; ++i) sum += values[i];
    sums[g] = sum;
  }
}

template <class TX>
void quantize_rows(const LinearArgs& args, int64_t block, char* packed) {
  const PackedWeight& weight = args.weight;
  const int64_t row_bytes = quantized_row_bytes(weight), num_groups = num_x_groups(weight);
  const int64_t count = weight.num_quants();
  for (int r = 0; r < rows_in_block(args, block); ++r, packed += row_bytes) {
    int8_t* values = reinterpret_cast<int8_t*>(packed);
    float* scales = reinterpret_cast<float*>(values + weight.depth());
    int32_t* sums = reinterpret_cast<int32_t*>(scales + num_groups);
    std::memset(values + count / Vec::kLanes * Vec::kLanes, 0, weight.depth() - count / Vec::kLanes * Vec::kLanes);
    with_columns(args, row_of_x<TX>(args, block * kRowBlock + r), [&](const auto* x) {
      for (int64_t g = 0; g < num_groups; ++g) {
        const int64_t begin = weight.group_begin(g);
        const int64_t end = num_groups > 1 && weight.group_end(g) < count ? weight.group_end(g) : count;
        quantize_group(x + begin, end - begin, values + begin, scales + g, sums + g);
      }
    });
    if (has_steps(weight.format)) add_up_groups(weight, values, sums + 1);
  }
}

void quantized_pack_block(const LinearArgs& args, int64_t block, void* packed) {
  if (args.x.dtype == DType::bf16)
    quantize_rows<bf16>(args, block, static_cast<char*>(packed));
  else
    quantize_rows<float>(args, block, static_cast<char*>(packed));
}

int64_t quantized_block_bytes(const LinearArgs& args) { return kRowBlock * quantized_row_bytes(args.weight); }

// 64 bytes of a tile are kDepths of 16 columns, as kParts rows of quads. The weight + offset is multiplied. Formats of
// one kind are distinguished at run time: separate kernels would take minutes to compile.
struct ByteWeights {
  static constexpr int kDepths = 4, kParts = 1, kTileBytes = kQuadTileBytes<8>;
  int offset = SignedQuads::kOffset;

  template <int kPart>
  SignedQuads load(const uint8_t* p) const {
    return SignedQuads::load(p);
  }
};
struct NibbleWeights {
  static constexpr int kDepths = 8, kParts = 2, kTileBytes = kQuadTileBytes<4>;
  int offset;

  template <int kPart>
  NibbleQuads load(const uint8_t* p) const {
    return NibbleQuads::load<kPart == 1>(p);
  }
};
// Nibbles that are indices into a table of 16 quants.
struct TableWeights {
  static constexpr int kDepths = 8, kParts = 2, kTileBytes = kQuadTileBytes<4>;
  const int8_t* table;
  int offset = SignedQuads::kOffset;

  template <int kPart>
  SignedQuads load(const uint8_t* p) const {
    return SignedQuads::look_up(table, NibbleQuads::load<kPart == 1>(p));
  }
};

// Loads scales or mins of Vec::kLanes columns.
inline Vec load_scales(const char* scales, bool is_half, int64_t index) {
  return is_half ? load_halves(reinterpret_cast<const f16*>(scales) + index)
                 : Vec::load(reinterpret_cast<const float*>(scales) + index);
}

// Loads the mins of Vec::kLanes columns of a strip from `column` on; zeros if the format has none.
inline Vec load_mins(const PackedWeight& weight, const char* scales, bool is_half, int64_t column, Vec weight_scales) {
  if (!has_mins(weight.format)) return Vec::zero();
  const Vec mins = load_scales(scales, is_half, kStripColumns + column);
  return has_zeros(weight.format) ? mins * weight_scales : mins;
}

// Returns total + a row's scaled sums of a group.
TILEWRIGHT_INLINE Vec add_group(IntVec sums, float x_scale, Vec weight_scales, Vec total) {
  return fma(sums.to_float() * Vec::set1(x_scale), weight_scales, total);
}
// Returns total - the contribution of a group's min.
TILEWRIGHT_INLINE Vec subtract_min(Vec mins, float x_scale, int32_t x_sum, Vec total) {
  return fma(mins, Vec::set1(-(x_scale * static_cast<float>(x_sum))), total);
}

// fn(constant) for 0 to kCount - 1: constants from the start, since gcc unrolls loops too late to keep arrays of sums
// in registers.
template <int kCount, class Fn>
TILEWRIGHT_INLINE void unrolled(Fn fn) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) __attribute__((always_inline)) {
    (fn(std::integral_constant<int, kIndex>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// Vecs of columns of kTiles tiles.
template <int kTiles>
inline constexpr int kColumnVecs = kTiles * kTileColumns / Vec::kLanes;

// First column of a Vec.
TILEWRIGHT_INLINE constexpr int column_of(int vec) { return vec * Vec::kLanes; }

// sums += the products of four depths.
template <int kPart, int kRows, int kTiles, class Weights>
TILEWRIGHT_INLINE void multiply_quads(const Weights& weights, const RowPointers<int8_t, kRows>& rows,
                                      const uint8_t* line, IntVec (&sums)[kRows * kColumnVecs<kTiles>]) {
  constexpr int kVecs = kColumnVecs<kTiles>;
  decltype(weights.template load<kPart>(line)) quads[kVecs];
  unrolled<kVecs>([&](auto v) __attribute__((always_inline)) {
    constexpr int kColumn = column_of(v.value);
    quads[v.value] =
        weights.template load<kPart>(line + kColumn / kTileColumns * Weights::kTileBytes + kColumn % kTileColumns * 4);
  });
  unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
    const RowQuad x = RowQuad::load(rows[r.value] + 4 * kPart);
    unrolled<kVecs>([&](auto v) __attribute__((always_inline)) {
      constexpr int kSum = decltype(r)::value * kVecs + decltype(v)::value;
      sums[kSum] = dot(sums[kSum], quads[v.value], x);
    });
  });
}

// sums += the products of the depths [begin, end) of a strip with tiles at `data`.
template <int kRows, int kTiles, class Weights>
TILEWRIGHT_INLINE void multiply_depths_of(const Weights& weights, const uint8_t* data, const int8_t* x,
                                          int64_t row_bytes, int64_t begin, int64_t end,
                                          IntVec (&sums)[kRows * kColumnVecs<kTiles>]) {
  RowPointers<int8_t, kRows> rows(x + begin, row_bytes);
  for (int64_t depth = begin; depth < end;) {
    const int64_t in_tile = depth & (kQuadTileDepth - 1), left = kQuadTileDepth - in_tile;
    const int64_t count = end - depth < left ? end - depth : left;
    const uint8_t* line =
        data + (depth - in_tile) / kQuadTileDepth * 2 * Weights::kTileBytes + in_tile / Weights::kDepths * 64;
    for (int64_t d = 0; d < count; d += Weights::kDepths, line += 64, rows.advance(Weights::kDepths)) {
      // Weights come from memory, at full speed if they are prefetched early enough; for further blocks of rows from
      // L2.
      for (int t = 0; t < kTiles; ++t) __builtin_prefetch(line + t * Weights::kTileBytes + DotTraits::kPrefetchBytes);
      multiply_quads<0, kRows, kTiles>(weights, rows, line, sums);
      if constexpr (Weights::kParts == 2) multiply_quads<1, kRows, kTiles>(weights, rows, line, sums);
    }
    depth += count;
  }
}

// c [kRows, 16 kTiles] of stride 32, from tile `tile` of a strip on.
template <int kRows, int kTiles, class Weights>
void multiply_rows(const Weights& weights, const PackedWeight& weight, int64_t strip, int tile, const char* x,
                   int64_t row_bytes, float* c) {
  constexpr int kVecs = kColumnVecs<kTiles>;
  const uint8_t* data = weight.strip<uint8_t>(strip) + tile * Weights::kTileBytes;
  const QuantizedRow first_row(weight, x);
  const bool is_half = weight.scale_dtype() == DType::f16, with_mins = has_mins(weight.format);
  for (int64_t g = 0; g < weight.num_groups(); ++g) {
    const auto in_row = [&](auto* of_first, int r) __attribute__((always_inline)) {
      return reinterpret_cast<decltype(of_first)>(reinterpret_cast<const char*>(of_first) + r * row_bytes)[g];
    };
    IntVec sums[kRows * kVecs];
    unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
      const IntVec start = IntVec::set1(-weights.offset * in_row(first_row.sums, r.value));
      unrolled<kVecs>([&](auto v)
                          __attribute__((always_inline)) { sums[decltype(r)::value * kVecs + v.value] = start; });
    });
    multiply_depths_of<kRows, kTiles>(weights, data, first_row.values, row_bytes, weight.group_begin(g),
                                      weight.group_end(g), sums);
    unrolled<kRows * kVecs>([&](auto i) __attribute__((always_inline)) { sums[i.value].settle(); });
    const char* scales = weight.scales_at(strip, g);
    unrolled<kVecs>([&](auto v) __attribute__((always_inline)) {
      const int column = tile * kTileColumns + column_of(v.value);
      const Vec weight_scales = load_scales(scales, is_half, column);
      const Vec mins = load_mins(weight, scales, is_half, column, weight_scales);
      unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
        constexpr int kSum = decltype(r)::value * kVecs + decltype(v)::value;
        float* out = c + r.value * kStripColumns + column_of(v.value);
        const float x_scale = in_row(first_row.scales, r.value);
        Vec total = add_group(sums[kSum], x_scale, weight_scales, g == 0 ? Vec::zero() : Vec::load(out));
        if (with_mins) total = subtract_min(mins, x_scale, in_row(first_row.sums, r.value), total);
        total.store(out);
      });
    });
  }
}

// The same product with steps: base + step * q of each group, summed exactly.
template <int kRows, int kTiles>
void multiply_rows_in_steps(const PackedWeight& weight, int64_t strip, int tile, const char* x, int64_t row_bytes,
                            float* c) {
  constexpr int kVecs = kColumnVecs<kTiles>;
  constexpr NibbleWeights kWeights = {0};
  const uint8_t* data = weight.strip<uint8_t>(strip) + tile * NibbleWeights::kTileBytes;
  const QuantizedRow first_row(weight, x);
  const auto in_row = [&](auto* of_first, int r) __attribute__((always_inline)) {
    return *reinterpret_cast<decltype(of_first)>(reinterpret_cast<const char*>(of_first) + r * row_bytes);
  };
  alignas(64) int32_t totals[kRows * kTiles * kTileColumns] = {};
  for (int64_t g = 0; g < weight.num_groups(); ++g) {
    IntVec sums[kRows * kVecs];
    unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
      const IntVec start = IntVec::set1(-8 * in_row(first_row.sums + 1 + g, r.value));
      unrolled<kVecs>([&](auto v)
                          __attribute__((always_inline)) { sums[decltype(r)::value * kVecs + v.value] = start; });
    });
    multiply_depths_of<kRows, kTiles>(kWeights, data, first_row.values, row_bytes, weight.group_begin(g),
                                      weight.group_end(g), sums);
    unrolled<kRows * kVecs>([&](auto i) __attribute__((always_inline)) { sums[i.value].settle(); });
    const uint8_t* steps = weight.steps_at(strip, g) + tile * kTileColumns;
    const int8_t* bases = reinterpret_cast<const int8_t*>(steps + kStripColumns);
    unrolled<kVecs>([&](auto v) __attribute__((always_inline)) {
      const Steps own = Steps::load(steps + column_of(v.value), bases + column_of(v.value));
      unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
        int32_t* total = totals + r.value * kTiles * kTileColumns + column_of(v.value);
        const IntVec own_sums = sums[decltype(r)::value * kVecs + decltype(v)::value];
        add_steps(IntVec::load(total), own_sums, in_row(first_row.sums + 1 + g, r.value), own).store(total);
      });
    });
  }
  const float* scales = weight.row_scales(strip) + tile * kTileColumns;
  for (int r = 0; r < kRows; ++r)
    for (int column = 0; column < kTiles * kTileColumns; column += Vec::kLanes)
      add_group(IntVec::load(totals + r * kTiles * kTileColumns + column), in_row(first_row.scales, r),
                Vec::load(scales + column), Vec::zero())
          .store(c + r * kStripColumns + column);
}

// multiply(rows, tiles, first row, first tile) for blocks of rows and tiles whose sums fit the registers.
template <class Multiply>
inline void in_blocks(int rows, Multiply multiply) {
  int blocks = (rows + QuadTraits::kRows - 1) / QuadTraits::kRows;  // even ones, as in base/dot.h
  for (int row = 0, count = 0; blocks > 0; row += count, --blocks) {
    count = (rows - row + blocks - 1) / blocks;
    with_rows<QuadTraits::kRows>(count, [&](auto num_rows) {
      constexpr int kTiles = QuadTraits::tiles(num_rows.value);
      for (int tile = 0; tile < 2; tile += kTiles) multiply(num_rows, std::integral_constant<int, kTiles>{}, row, tile);
    });
  }
}

// Computes rows of c [rows, 32], the sums of one strip.
template <class Weights>
void multiply_strip_of(const Weights& weights, const PackedWeight& weight, int64_t strip, const char* x,
                       int64_t row_bytes, int rows, float* c) {
  in_blocks(rows, [&](auto num_rows, auto num_tiles, int row, int tile) {
    multiply_rows<num_rows.value, num_tiles.value>(weights, weight, strip, tile, x + row * row_bytes, row_bytes,
                                                   c + row * kStripColumns + tile * kTileColumns);
  });
}

void multiply_strip_in_steps(const PackedWeight& weight, int64_t strip, const char* x, int64_t row_bytes, int rows,
                             float* c) {
  in_blocks(rows, [&](auto num_rows, auto num_tiles, int row, int tile) {
    multiply_rows_in_steps<num_rows.value, num_tiles.value>(weight, strip, tile, x + row * row_bytes, row_bytes,
                                                            c + row * kStripColumns + tile * kTileColumns);
  });
}

// 64 bytes, in two views.
using Bytes64 = uint8_t __attribute__((vector_size(64)));
using Words32 = uint16_t __attribute__((vector_size(64)));

// Repeats a byte of each of 16 columns by `pattern`: 0x01010101 repeats it for its quad.
template <class Lanes>
inline void for_quads(const uint8_t* columns, int32_t pattern, Lanes& lanes) {
  alignas(64) int32_t quads[kTileColumns];
  for (int i = 0; i < kTileColumns; i += Vec::kLanes)
    IntVec::set1(0).plus(IntVec::load_bytes(columns + i), IntVec::set1(pattern)).store(quads + i);
  std::memcpy(&lanes, quads, sizeof(lanes));
}

// Widens a line of a tile of nibbles to two of bytes. A step times 15 is a byte, so that words multiply two at once; a
// base is added modulo 256, as for signed bytes.
inline void widen_line(const uint8_t* nibbles, const Words32& steps, const Bytes64& bases, uint8_t* wide) {
  Words32 line;
  std::memcpy(&line, nibbles, sizeof(line));
  const Bytes64 first = reinterpret_cast<Bytes64>((line & 0x0f0f) * steps) + bases;
  const Bytes64 second = reinterpret_cast<Bytes64>((line >> 4 & 0x0f0f) * steps) + bases;
  std::memcpy(wide, &first, sizeof(first));
  std::memcpy(wide + 64, &second, sizeof(second));
}

// Returns a strip with steps as a weight of int8_rotated with a single strip, its bytes in `data`.
inline PackedWeight strip_as_bytes(const PackedWeight& weight, int64_t strip, uint8_t* data) {
  constexpr int kLines = kQuadTileDepth / 8;  // of a tile of nibbles
  const int group_lines = static_cast<int>(weight.group_size / 8);
  const uint8_t* nibbles = weight.strip<uint8_t>(strip);
  uint8_t* wide = data;
  for (int64_t tile = 0; tile < weight.num_depth_tiles() * 2; ++tile)
    for (int first = 0; first < kLines; first += group_lines) {
      const int64_t group = (tile / 2 * kLines + first) / group_lines;
      const uint8_t* columns = weight.steps_at(strip, group) + tile % 2 * kTileColumns;
      Words32 steps;
      Bytes64 bases;
      for_quads(columns, 0x00010001, steps);
      for_quads(columns + kStripColumns, 0x01010101, bases);
      for (int line = 0; line < group_lines; ++line, nibbles += 64, wide += 128)
        widen_line(nibbles, steps, bases, wide);
    }
  PackedWeight bytes = weight;
  bytes.format = WeightFormat::int8_rotated;
  bytes.group_size = 0;
  bytes.data = data;
  bytes.scales = weight.row_scales(strip);
  return bytes;
}

// fn(weights) for a format.
template <class Fn>
inline void with_weights(WeightFormat format, Fn fn) {
  const WeightTraits& traits = traits_of(format);
  if (traits.bits == 8) return fn(ByteWeights{});
  traits.table ? fn(TableWeights{traits.table}) : fn(NibbleWeights{traits.bias});
}

void run_in_steps(const LinearArgs& args, const void* packed_x, int64_t block_begin, int64_t block_end,
                  int64_t strip_begin, int64_t strip_end) {
  const PackedWeight& weight = args.weight;
  const int64_t row_bytes = quantized_row_bytes(weight);
  const int64_t end = end_row(args, block_end);
  // From this number of rows on it pays to convert a strip with steps to bytes first.
  const bool by_bytes = rows_of_blocks(args, block_begin, block_end) >= QuadTraits::kRowsToBytes;
  uint8_t* wide = by_bytes ? static_cast<uint8_t*>(thread_scratch(weight.depth() * kStripColumns)) : nullptr;
  alignas(64) float c[kRowBlock * kStripColumns];
  for (int64_t s = strip_begin; s < strip_end; ++s) {
    const PackedWeight bytes = by_bytes ? strip_as_bytes(weight, s, wide) : weight;
    for (int64_t row = block_begin * kRowBlock; row < end; row += kRowBlock) {
      const int rows = static_cast<int>(end - row < kRowBlock ? end - row : kRowBlock);
      const char* x = static_cast<const char*>(packed_x) + row * row_bytes;
      by_bytes ? multiply_strip_of(ByteWeights{}, bytes, 0, x, row_bytes, rows, c)
               : multiply_strip_in_steps(weight, s, x, row_bytes, rows, c);
      finish_block(args, c, row, rows, s);
    }
  }
}

void quantized_run(const LinearArgs& args, const void* packed_x, int64_t block_begin, int64_t block_end,
                   int64_t strip_begin, int64_t strip_end) {
  if (has_steps(args.weight.format))
    return run_in_steps(args, packed_x, block_begin, block_end, strip_begin, strip_end);
  const int64_t row_bytes = quantized_row_bytes(args.weight);
  const int64_t end = end_row(args, block_end);
  alignas(64) float c[kRowBlock * kStripColumns];
  with_weights(args.weight.format, [&](auto weights) {
    for (int64_t s = strip_begin; s < strip_end; ++s)
      for (int64_t row = block_begin * kRowBlock; row < end; row += kRowBlock) {
        const int rows = static_cast<int>(end - row < kRowBlock ? end - row : kRowBlock);
        multiply_strip_of(weights, args.weight, s, static_cast<const char*>(packed_x) + row * row_bytes, row_bytes,
                          rows, c);
        finish_block(args, c, row, rows, s);
      }
  });
}

}  // namespace
}  // namespace tilewright
