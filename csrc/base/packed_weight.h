// A packed weight and all that is needed to read it: the format of its values, their layout, and its shape. The pack
// cache's key depends on format, group and layout (ops/packed.py).
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/tile.h"

namespace tilewright {

// How a value is stored. A quant q stands for scale * q, scale * q - min or scale * (q - zero).
//   fp8           e4m3, a byte; x is not rounded
//   int8_exact    -127 to 127, a byte; x is not rounded
//   int8          -127 to 127, a byte
//   int8_min      -127 to 127, a byte, with mins
//   int8_rotated  -127 to 127, a byte, of rows that are rotated (base/rotate.h), as those of x are for the product
//   int4          -8 to 7, half a byte, stored as q + 8
//   uint4         0 to 15, half a byte, with mins
//   uint4_zero    0 to 15, half a byte, with zeros
//   mxfp4         one of kMxfp4Values, half a byte
//   iq4_nl        one of kIq4NlValues, half a byte
//   int4_rotated  0 to 15, half a byte, of rotated rows. Stands for scale * (base + step * q), with one scale for a
//                 row; step and base of a group are integers, so that base + step * q is a byte
enum class WeightFormat : int {
  f32,
  bf16,
  fp8,
  int8_exact,
  int8,
  int8_min,
  int8_rotated,
  int4,
  uint4,
  uint4_zero,
  mxfp4,
  iq4_nl,
  int4_rotated
};

// How products take the quants of a format.
enum class WeightProduct : int {
  as_stored,  // values that are not quantised
  widened,    // each byte becomes the bf16 that has its value; x is not rounded
  bytes       // x is rounded to bytes too
};

// What is subtracted from the scaled quants of a group.
enum class GroupOffset : int { none, min, zero };

struct Range {
  int least, most;
};

// All that differs between formats, for whoever packs, multiplies or reads them.
struct WeightTraits {
  WeightFormat format;
  const char* name;
  WeightProduct product = WeightProduct::bytes;
  DType storage = DType::u8;      // of the elements that hold the values
  int bits = 8;                   // of a value in them
  Range quants = {-127, 127};     // or codes of them; of quantised formats
  int bias = 0;                   // added to a quant to store it without a sign
  const int8_t* table = nullptr;  // values of the codes; null: they are the quants
  GroupOffset offset = GroupOffset::none;
  bool has_steps = false;         // a byte is base + step * q
  bool is_rotated = false;        // rows are
  bool has_whole_rows = false;    // a row may have one scale for all its values
  Range group_sizes = {16, 256};  // of kGroupSizes; {0, 0}: none
  bool has_rounding = false;      // kernels/linear/round_weight.h makes its quants
};

namespace {  // no symbols of files that have an ISA level's instructions

// Values of the codes of a nibble: those of mxfp4 are twice e2m1, so that all are integers.
constexpr int8_t kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int8_t kIq4NlValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

constexpr Range kCodes = {0, 15}, kNoGroups = {0, 0};
constexpr Range kGroupsOfTiles = {kTileDepth, 256};
constexpr Range kGroupsInSteps = {16, 32};  // whose sums, of quants from -8 to 7, fit 16 bits

constexpr WeightTraits kWeightTraits[] = {
    {.format = WeightFormat::f32,
     .name = "float32",
     .product = WeightProduct::as_stored,
     .storage = DType::f32,
     .bits = 32,
     .group_sizes = kNoGroups},
    {.format = WeightFormat::bf16,
     .name = "bfloat16",
     .product = WeightProduct::as_stored,
     .storage = DType::bf16,
     .bits = 16,
     .group_sizes = kNoGroups},
    {.format = WeightFormat::fp8,
     .name = "fp8",
     .product = WeightProduct::widened,
     .quants = {0, 255},
     .has_whole_rows = true,
     .group_sizes = kGroupsOfTiles},
    {.format = WeightFormat::int8_exact,
     .name = "int8_exact",
     .product = WeightProduct::widened,
     .has_whole_rows = true,
     .group_sizes = kGroupsOfTiles},
    {.format = WeightFormat::int8, .name = "int8", .has_whole_rows = true, .has_rounding = true},
    {.format = WeightFormat::int8_min, .name = "int8_min", .offset = GroupOffset::min},
    {.format = WeightFormat::int8_rotated,
     .name = "int8_rotated",
     .is_rotated = true,
     .has_whole_rows = true,
     .group_sizes = kNoGroups,
     .has_rounding = true},
    {.format = WeightFormat::int4, .name = "int4", .bits = 4, .quants = {-8, 7}, .bias = 8, .has_rounding = true},
    {.format = WeightFormat::uint4,
     .name = "uint4",
     .bits = 4,
     .quants = kCodes,
     .offset = GroupOffset::min,
     .has_rounding = true},
    {.format = WeightFormat::uint4_zero,
     .name = "uint4_zero",
     .bits = 4,
     .quants = kCodes,
     .offset = GroupOffset::zero},
    {.format = WeightFormat::mxfp4, .name = "mxfp4", .bits = 4, .quants = kCodes, .table = kMxfp4Values},
    {.format = WeightFormat::iq4_nl, .name = "iq4_nl", .bits = 4, .quants = kCodes, .table = kIq4NlValues},
    {.format = WeightFormat::int4_rotated,
     .name = "int4_rotated",
     .bits = 4,
     .quants = kCodes,
     .has_steps = true,
     .is_rotated = true,
     .group_sizes = kGroupsInSteps,
     .has_rounding = true}};

}  // namespace

TILEWRIGHT_INLINE constexpr const WeightTraits& traits_of(WeightFormat format) {
  return kWeightTraits[static_cast<int>(format)];
}

TILEWRIGHT_INLINE constexpr bool is_quantized(WeightFormat format) {
  return traits_of(format).product != WeightProduct::as_stored;
}
TILEWRIGHT_INLINE constexpr bool is_widened(WeightFormat format) {
  return traits_of(format).product == WeightProduct::widened;
}
TILEWRIGHT_INLINE constexpr bool rounds_x(WeightFormat format) {
  return traits_of(format).product == WeightProduct::bytes;
}
TILEWRIGHT_INLINE constexpr bool has_nibbles(WeightFormat format) { return traits_of(format).bits == 4; }
TILEWRIGHT_INLINE constexpr int64_t quad_tile_bytes(WeightFormat format) {
  return has_nibbles(format) ? kQuadTileBytes<4> : kQuadTileBytes<8>;
}
TILEWRIGHT_INLINE constexpr bool has_zeros(WeightFormat format) {
  return traits_of(format).offset == GroupOffset::zero;
}
TILEWRIGHT_INLINE constexpr bool has_mins(WeightFormat format) {  // or zeros in their place
  return traits_of(format).offset != GroupOffset::none;
}
TILEWRIGHT_INLINE constexpr bool has_steps(WeightFormat format) { return traits_of(format).has_steps; }
TILEWRIGHT_INLINE constexpr bool is_rotated(WeightFormat format) { return traits_of(format).is_rotated; }
TILEWRIGHT_INLINE constexpr const char* name_of(WeightFormat format) { return traits_of(format).name; }

template <class T>
inline constexpr WeightFormat kFormatOf = kIsBf16<T> ? WeightFormat::bf16 : WeightFormat::f32;

// Layout of the values (base/tile.h). Halves are those of bf16 if the level multiplies in fp16: a row of W is divided
// by the power of two that brings its largest value to between 512 and 1,024. Values below 2^-27 of the largest lose
// some bits.
enum class WeightLayout : int { tiles, halves };

inline constexpr const char* name_of(WeightLayout layout) {
  return layout == WeightLayout::tiles ? "tiles of 32 x 16 in pairs, strips of 32"
                                       : "depths of 32 columns in fp16, strips of 32 with their scales";
}

// Groups are whole lines of nibbles, and either whole tiles of quads or a whole fraction of one.
inline constexpr int64_t kGroupSizes[] = {16, 32, 64, 128, 256};

// Whether a group size is supported; 0: one scale for all values of a row.
inline constexpr bool has_groups_of(WeightFormat format, int64_t size) {
  const WeightTraits& traits = traits_of(format);
  if (size == 0) return traits.has_whole_rows;
  for (const int64_t known : kGroupSizes)
    if (size == known) return size >= traits.group_sizes.least && size <= traits.group_sizes.most;
  return false;
}

namespace {

// What the table must be: complete, and true to itself.
template <class Fn>
consteval bool every_format(Fn holds) {
  for (const WeightTraits& traits : kWeightTraits)
    if (!holds(traits)) return false;
  return true;
}
static_assert(sizeof(kWeightTraits) / sizeof(WeightTraits) == static_cast<int>(WeightFormat::int4_rotated) + 1 &&
                  every_format([row = 0](const WeightTraits& traits) mutable {
                    return static_cast<int>(traits.format) == row++;
                  }),
              "kWeightTraits has a row for each format, in the order of WeightFormat");
static_assert(every_format([](const WeightTraits& traits) {
                return !is_quantized(traits.format)
                           ? traits.bits == 8 * static_cast<int>(size_of(traits.storage))
                           : traits.storage == DType::u8 && traits.quants.most - traits.quants.least < 1 << traits.bits;
              }),
              "values fit their bits");
static_assert(every_format([](const WeightTraits& traits) {
                return (traits.bias == 0 || traits.bias == -traits.quants.least) &&
                       (!traits.table || traits.quants.most == 15);
              }),
              "quants with a bias have no sign, and tables have 16 values");
static_assert(every_format([](const WeightTraits& traits) {
                return is_quantized(traits.format) == (traits.has_whole_rows || traits.group_sizes.most > 0);
              }),
              "quantised formats have scales, the others none");

}  // namespace

// Depth up to which a sum of products of two bytes fits 32 bits.
inline constexpr int64_t kMaxQuantizedDepth = 131072;

struct PackedWeight {
  void* data = nullptr;  // elements() of its storage; of several experts one after the other
  // For quantised formats, for each strip and group 32 scales, one per column, then as many mins if the format has
  // them. In fp16; in fp32 if a row is one group, or x is not rounded. With steps, for each strip 32 fp32 scales, and
  // for each of its groups 32 steps and 32 bases, a byte each.
  void* scales = nullptr;
  int64_t group_size = 0;  // values of a row that share a scale; 0: all of them
  WeightFormat format = WeightFormat::f32;
  WeightLayout layout = WeightLayout::tiles;
  int64_t n = 0, k = 0;  // rows and columns of W [N, K]
  bool gated = false;    // rows [0, n/2) are gate, [n/2, n) up: act(gate) * up has n / 2 columns

  TILEWRIGHT_INLINE int64_t out_features() const { return gated ? n / 2 : n; }
  TILEWRIGHT_INLINE int64_t num_strips() const {
    return ceil_div(out_features(), gated ? kTileColumns : kStripColumns);
  }
  TILEWRIGHT_INLINE int64_t tile_depth() const { return rounds_x(format) ? kQuadTileDepth : kTileDepth; }
  TILEWRIGHT_INLINE int64_t num_depth_tiles() const { return ceil_div(k, tile_depth()); }
  TILEWRIGHT_INLINE int64_t depth() const { return num_depth_tiles() * tile_depth(); }  // k, padded to whole tiles
  // Quants of a row: one per value, but a rotation includes the padding to tiles.
  TILEWRIGHT_INLINE int64_t num_quants() const { return is_rotated(format) ? depth() : k; }
  // Elements of a strip before its values: for halves the fp32 scales of its columns.
  TILEWRIGHT_INLINE int64_t head_elements() const { return layout == WeightLayout::halves ? 2 * kStripColumns : 0; }
  TILEWRIGHT_INLINE int64_t strip_elements() const {
    return head_elements() + depth() * kStripColumns / (has_nibbles(format) ? 2 : 1);
  }
  TILEWRIGHT_INLINE int64_t elements() const { return num_strips() * strip_elements(); }
  TILEWRIGHT_INLINE int64_t size_bytes() const {
    return elements() * static_cast<int64_t>(size_of(traits_of(format).storage));
  }

  // Pointer to the values of a strip.
  template <class T>
  TILEWRIGHT_INLINE T* strip(int64_t index) const {
    return static_cast<T*>(data) + index * strip_elements() + head_elements();
  }
  // Factors of a strip's columns; null: none.
  TILEWRIGHT_INLINE float* column_scales(int64_t strip) const {
    if (layout != WeightLayout::halves) return nullptr;
    return reinterpret_cast<float*>(static_cast<uint16_t*>(data) + strip * strip_elements());
  }

  TILEWRIGHT_INLINE int64_t num_groups() const { return group_size ? ceil_div(num_quants(), group_size) : 1; }
  TILEWRIGHT_INLINE int64_t group_begin(int64_t group) const { return group * group_size; }
  TILEWRIGHT_INLINE int64_t group_end(int64_t group) const {  // in the padded depth
    const int64_t end = group_begin(group + 1);
    return group_size && end < depth() ? end : depth();
  }
  TILEWRIGHT_INLINE DType scale_dtype() const {
    if (has_steps(format)) return DType::u8;
    return group_size && rounds_x(format) ? DType::f16 : DType::f32;
  }
  TILEWRIGHT_INLINE int64_t group_scales() const { return kStripColumns * (has_mins(format) ? 2 : 1); }
  TILEWRIGHT_INLINE int64_t strip_step_bytes() const { return kStripColumns * (4 + 2 * num_groups()); }
  TILEWRIGHT_INLINE int64_t num_scales() const {
    if (has_steps(format)) return num_strips() * strip_step_bytes();
    return is_quantized(format) ? num_strips() * num_groups() * group_scales() : 0;
  }
  // Pointer to the scales of a strip and a group.
  TILEWRIGHT_INLINE char* scales_at(int64_t strip, int64_t group) const {
    const int64_t index = (strip * num_groups() + group) * group_scales();
    return static_cast<char*>(scales) + index * static_cast<int64_t>(size_of(scale_dtype()));
  }

  // With steps: the scales of a strip, and the steps of one of its groups, which its bases follow.
  TILEWRIGHT_INLINE float* row_scales(int64_t strip) const {
    return reinterpret_cast<float*>(static_cast<char*>(scales) + strip * strip_step_bytes());
  }
  TILEWRIGHT_INLINE uint8_t* steps_at(int64_t strip, int64_t group) const {
    return reinterpret_cast<uint8_t*>(row_scales(strip) + kStripColumns) + group * 2 * kStripColumns;
  }

  // Returns one of several experts, which are stored consecutively.
  TILEWRIGHT_INLINE PackedWeight expert(int64_t index) const {
    PackedWeight own = *this;
    own.data = static_cast<char*>(data) + index * size_bytes();
    const int64_t scale_bytes = num_scales() * static_cast<int64_t>(size_of(scale_dtype()));
    if (scales) own.scales = static_cast<char*>(scales) + index * scale_bytes;
    return own;
  }
};

}  // namespace tilewright
