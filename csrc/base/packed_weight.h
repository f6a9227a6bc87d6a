// A packed weight and all that is needed to read it: how its values are stored, how they lie, and their shape.
//
// The pack cache's key follows from format, group and layout (ops/packed.py).
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/tile.h"

namespace tilewright {

// How a value is stored. Quantised ones are whole numbers q, which stand for scale * q, or scale * q - min:
//   int8      -127 to 127, a byte
//   int8_min  -127 to 127, a byte, with mins
//   int4      -8 to 7, half a byte, stored as q + 8
//   uint4     0 to 15, half a byte, with mins
enum class WeightFormat : int { f32, bf16, int8, int8_min, int4, uint4 };

inline constexpr WeightFormat kWeightFormats[] = {WeightFormat::f32,      WeightFormat::bf16, WeightFormat::int8,
                                                  WeightFormat::int8_min, WeightFormat::int4, WeightFormat::uint4};

inline constexpr bool is_quantized(WeightFormat format) { return format >= WeightFormat::int8; }
inline constexpr bool has_nibbles(WeightFormat format) { return format >= WeightFormat::int4; }
inline constexpr bool has_mins(WeightFormat format) {
  return format == WeightFormat::int8_min || format == WeightFormat::uint4;
}

// The type of the elements that hold a format's values.
inline constexpr DType storage_of(WeightFormat format) {
  if (is_quantized(format)) return DType::u8;
  return format == WeightFormat::bf16 ? DType::bf16 : DType::f32;
}

inline constexpr const char* name_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::int8: return "int8";
    case WeightFormat::int8_min: return "int8_min";
    case WeightFormat::int4: return "int4";
    case WeightFormat::uint4: return "uint4";
    default: return name_of(storage_of(format));
  }
}

template <class T>
inline constexpr WeightFormat kFormatOf = kIsBf16<T> ? WeightFormat::bf16 : WeightFormat::f32;

// How the values lie.
enum class WeightLayout : int { tiles };  // base/tile.h

inline constexpr const char* name_of(WeightLayout) { return "tiles of 32 x 16 in pairs, strips of 32"; }

// Groups are whole lines of nibbles, and either whole tiles of quads or whole parts of one.
inline constexpr int64_t kGroupSizes[] = {16, 32, 64, 128, 256};

// A sum of so many products of two bytes still fits 32 bits.
inline constexpr int64_t kMaxQuantizedDepth = 131072;

struct PackedWeight {
  void* data = nullptr;  // elements() of storage_of(format); of several experts one after the other
  // Of quantised formats, for each strip and group 32 scales, one for each of its columns, and then as many mins where
  // the format has them. In fp16; in fp32 where all values of a row are one group.
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
  TILEWRIGHT_INLINE int64_t tile_depth() const { return is_quantized(format) ? kQuadTileDepth : kTileDepth; }
  TILEWRIGHT_INLINE int64_t num_depth_tiles() const { return ceil_div(k, tile_depth()); }
  TILEWRIGHT_INLINE int64_t depth() const { return num_depth_tiles() * tile_depth(); }  // k, padded to whole tiles
  TILEWRIGHT_INLINE int64_t strip_elements() const { return depth() * kStripColumns / (has_nibbles(format) ? 2 : 1); }
  TILEWRIGHT_INLINE int64_t elements() const { return num_strips() * strip_elements(); }
  TILEWRIGHT_INLINE int64_t size_bytes() const {
    return elements() * static_cast<int64_t>(size_of(storage_of(format)));
  }

  template <class T>
  TILEWRIGHT_INLINE T* strip(int64_t index) const {
    return static_cast<T*>(data) + index * strip_elements();
  }

  TILEWRIGHT_INLINE int64_t num_groups() const { return group_size ? ceil_div(k, group_size) : 1; }
  TILEWRIGHT_INLINE int64_t group_begin(int64_t group) const { return group * group_size; }
  TILEWRIGHT_INLINE int64_t group_end(int64_t group) const {  // in the padded depth
    const int64_t end = group_begin(group + 1);
    return group_size && end < depth() ? end : depth();
  }
  TILEWRIGHT_INLINE DType scale_dtype() const { return group_size ? DType::f16 : DType::f32; }
  TILEWRIGHT_INLINE int64_t group_scales() const { return kStripColumns * (has_mins(format) ? 2 : 1); }
  TILEWRIGHT_INLINE int64_t num_scales() const {
    return is_quantized(format) ? num_strips() * num_groups() * group_scales() : 0;
  }
  // Where the scales of a strip and a group begin.
  TILEWRIGHT_INLINE char* scales_at(int64_t strip, int64_t group) const {
    const int64_t index = (strip * num_groups() + group) * group_scales();
    return static_cast<char*>(scales) + index * static_cast<int64_t>(size_of(scale_dtype()));
  }

  // One of several experts that lie one after the other.
  TILEWRIGHT_INLINE PackedWeight expert(int64_t index) const {
    PackedWeight own = *this;
    own.data = static_cast<char*>(data) + index * size_bytes();
    const int64_t scale_bytes = num_scales() * static_cast<int64_t>(size_of(scale_dtype()));
    if (scales) own.scales = static_cast<char*>(scales) + index * scale_bytes;
    return own;
  }
};

}  // namespace tilewright
