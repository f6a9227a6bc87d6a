// Single values of a packed weight that is quantised or in halves, for readers of few of them, such as an embedding
// look-up.
#pragma once

#include "base/fp8.h"
#include "base/half.h"
#include "base/packed_weight.h"
#include "base/rotate.h"
#include "base/scratch.h"

namespace tilewright {
namespace {

// Offset in a strip, in bytes, of the quant of a column at depth k.
struct PackedPlace {
  int64_t offset;
  bool is_upper;  // of a nibble: in the upper half of the byte

  PackedPlace(const PackedWeight& weight, int column, int64_t k) {
    if (is_widened(weight.format)) {
      const int64_t tile = k / kTileDepth * 2 + column / kTileColumns;
      offset = tile * kTileElements + tile_offset<bf16>(static_cast<int>(k % kTileDepth), column % kTileColumns);
      is_upper = false;
      return;
    }
    const bool nibbles = has_nibbles(weight.format);
    const int depth = static_cast<int>(k % kQuadTileDepth);
    const int64_t tile = k / kQuadTileDepth * 2 + column / kTileColumns;
    offset = tile * quad_tile_bytes(weight.format) + (nibbles ? quad_offset<true>(depth, column % kTileColumns)
                                                              : quad_offset<false>(depth, column % kTileColumns));
    is_upper = nibbles && depth % 8 >= 4;
  }
};

inline float scale_of(const PackedWeight& weight, int64_t strip, int64_t group, int index) {
  const char* scales = weight.scales_at(strip, group);
  return weight.scale_dtype() == DType::f16 ? to_float(reinterpret_cast<const f16*>(scales)[index])
                                            : reinterpret_cast<const float*>(scales)[index];
}

// Returns the value of the quant at depth k of a column of a strip.
inline float packed_value(const PackedWeight& weight, int64_t strip, int column, int64_t k) {
  const PackedPlace place(weight, column, k);
  const uint8_t byte = weight.strip<uint8_t>(strip)[place.offset];
  const int64_t group = weight.group_size ? k / weight.group_size : 0;
  if (has_steps(weight.format)) {
    const uint8_t* steps = weight.steps_at(strip, group);
    const int base = static_cast<int8_t>(steps[kStripColumns + column]);
    const int quant = base + steps[column] * (place.is_upper ? byte >> 4 : byte & 15);
    return weight.row_scales(strip)[column] * static_cast<float>(quant);
  }
  const float scale = scale_of(weight, strip, group, column);
  if (weight.format == WeightFormat::fp8) return scale * to_float(fp8_to_bf16(byte));
  const WeightTraits& traits = traits_of(weight.format);
  int quant = static_cast<int8_t>(byte);
  if (traits.bits == 4) quant = (place.is_upper ? byte >> 4 : byte & 15) - traits.bias;
  if (traits.table) quant = traits.table[quant];
  const float value = scale * static_cast<float>(quant);
  if (!has_mins(weight.format)) return value;
  const float min = scale_of(weight, strip, group, kStripColumns + column);
  return value - (has_zeros(weight.format) ? scale * min : min);
}

// Whether a weight's tiles have its plain values.
inline bool is_plain(const PackedWeight& weight) {
  return !is_quantized(weight.format) && weight.layout == WeightLayout::tiles;
}

// Unpacks the row of W in a column of a strip, for a weight that is not plain.
template <class T>
inline void unpack_column(const PackedWeight& weight, int64_t strip, int column, T* out) {
  if (weight.layout == WeightLayout::halves) {
    const f16* halves = weight.strip<f16>(strip);
    const float scale = weight.column_scales(strip)[column];
    for (int64_t k = 0; k < weight.k; ++k) assign(out[k], scale * to_float(halves[k * kStripColumns + column]));
    return;
  }
  if (!is_rotated(weight.format)) {
    for (int64_t k = 0; k < weight.k; ++k) assign(out[k], packed_value(weight, strip, column, k));
    return;
  }
  float* row = static_cast<float*>(thread_scratch(static_cast<size_t>(weight.depth()) * sizeof(float)));
  for (int64_t k = 0; k < weight.depth(); ++k) row[k] = packed_value(weight, strip, column, k);
  rotate(row, weight.depth());
  for (int64_t k = 0; k < weight.k; ++k) assign(out[k], row[k]);
}

}  // namespace
}  // namespace tilewright
