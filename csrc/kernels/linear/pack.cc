// Packs weights into tiles and unpacks them. Done once per load, so plain code, a strip per task.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/bf16.h"
#include "base/parallel.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/packed_value.h"

namespace tilewright {
namespace {

// Returns the row of W in column c of strip s, or -1 for padding.
int64_t source_row(const PackedWeight& packed, int64_t strip, int column) {
  if (!packed.gated) {
    const int64_t row = strip * kStripColumns + column;
    return row < packed.n ? row : -1;
  }
  const int64_t row = strip * kTileColumns + column % kTileColumns;
  if (row >= packed.n / 2) return -1;
  return column < kTileColumns ? row : packed.n / 2 + row;
}

template <class T, class P>
void pack_strip(const PackArgs& args, int64_t strip) {
  const int64_t depth_tiles = args.packed.num_depth_tiles();
  P* packed = args.packed.strip<P>(strip);
  for (int column = 0; column < kStripColumns; ++column) {
    const int64_t row = source_row(args.packed, strip, column);
    const T* source = row < 0 ? nullptr : args.weight.row<T>(row);
    for (int64_t d = 0; d < depth_tiles; ++d) {
      P* tile = packed + (d * 2 + column / kTileColumns) * kTileElements;
      const int64_t depth = d * kTileDepth;
      for (int i = 0; i < kTileDepth; ++i)
        assign(tile[tile_offset<P>(i, column % kTileColumns)],
               source && depth + i < args.packed.k ? to_float(source[depth + i]) : 0.0f);
    }
  }
}

template <class T, class P>
void unpack_strip(const PackArgs& args, int64_t strip) {
  const P* packed = args.packed.strip<P>(strip);
  for (int column = 0; column < kStripColumns; ++column) {
    const int64_t row = source_row(args.packed, strip, column);
    if (row < 0) continue;
    T* target = args.weight.row<T>(row);
    for (int64_t k = 0; k < args.packed.k; ++k) {
      const P* tile = packed + (k / kTileDepth * 2 + column / kTileColumns) * kTileElements;
      assign(target[k], to_float(tile[tile_offset<P>(static_cast<int>(k % kTileDepth), column % kTileColumns)]));
    }
  }
}

// Returns the power of two of a row that is stored as halves.
template <class T>
float halves_scale(const T* row, int64_t count) {
  float largest = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::fabs(to_float(row[i]));
    if (std::isfinite(magnitude) && magnitude > largest) largest = magnitude;
  }
  return largest == 0.0f ? 1.0f : std::ldexp(1.0f, std::max(std::ilogb(largest), -100) - 9);
}

inline float as_bf16(bf16 value) { return to_float(value); }
inline float as_bf16(float value) { return to_float(to_bf16(value)); }

// A few depths of all columns at a time: a column's neighbours are a line apart, and the lines of a whole strip do not
// fit the L1 cache.
template <class T>
void pack_halves_strip(const PackArgs& args, int64_t strip) {
  constexpr int64_t kDepths = 64;
  const PackedWeight& weight = args.packed;
  const T* rows[kStripColumns];
  float factors[kStripColumns];
  for (int column = 0; column < kStripColumns; ++column) {
    const int64_t row = source_row(weight, strip, column);
    rows[column] = row < 0 ? nullptr : args.weight.row<T>(row);
    const float scale = row < 0 ? 1.0f : halves_scale(rows[column], weight.k);
    weight.column_scales(strip)[column] = scale;
    factors[column] = 1.0f / scale;
  }
  f16* halves = weight.strip<f16>(strip);
  std::memset(halves, 0, static_cast<size_t>(weight.depth() * kStripColumns) * sizeof(f16));
  for (int64_t begin = 0; begin < weight.k; begin += kDepths)
    for (int column = 0; column < kStripColumns; ++column)
      for (int64_t k = begin; rows[column] && k < std::min(begin + kDepths, weight.k); ++k)
        halves[k * kStripColumns + column] = to_half(as_bf16(rows[column][k]) * factors[column]);
}

// Writes zeros for padding rows.
void pack_steps(const PackArgs& args, int64_t strip, int column, int64_t row) {
  const PackedWeight& packed = args.packed;
  packed.row_scales(strip)[column] = row < 0 ? 0.0f : *args.scales.row<float>(row);
  for (int64_t i = 0; i < 2 * packed.num_groups(); ++i) {
    const bool is_base = i >= packed.num_groups();
    uint8_t* steps = packed.steps_at(strip, is_base ? i - packed.num_groups() : i);
    steps[(is_base ? kStripColumns : 0) + column] = row < 0 ? uint8_t{0} : args.steps.row<uint8_t>(row)[i];
  }
}

void pack_quantized_strip(const PackArgs& args, int64_t strip) {
  const PackedWeight& packed = args.packed;
  const int bias = traits_of(packed.format).bias;
  const int64_t num_groups = packed.num_groups(), scale_bytes = static_cast<int64_t>(size_of(packed.scale_dtype()));
  uint8_t* data = packed.strip<uint8_t>(strip);
  std::memset(data, has_nibbles(packed.format) ? bias * 17 : 0, static_cast<size_t>(packed.strip_elements()));
  for (int column = 0; column < kStripColumns; ++column) {
    const int64_t row = source_row(packed, strip, column);
    const uint8_t* source = row < 0 ? nullptr : args.weight.row<uint8_t>(row);
    for (int64_t k = 0; source && k < packed.num_quants(); ++k) {
      const PackedPlace place(packed, column, k);
      uint8_t& byte = data[place.offset];
      if (!has_nibbles(packed.format)) {
        byte = source[k];
        continue;
      }
      const int nibble = (source[k] + bias) & 15;
      byte = static_cast<uint8_t>(place.is_upper ? (byte & 15) | nibble << 4 : (byte & 0xf0) | nibble);
    }
    if (has_steps(packed.format)) {
      pack_steps(args, strip, column, row);
      continue;
    }
    for (int64_t g = 0; g < num_groups; ++g)
      for (int part = 0; part < (has_mins(packed.format) ? 2 : 1); ++part) {
        const Rows& from = part ? args.mins : args.scales;
        char* to = packed.scales_at(strip, g) + (part * kStripColumns + column) * scale_bytes;
        if (row < 0)
          std::memset(to, 0, static_cast<size_t>(scale_bytes));
        else
          std::memcpy(to, static_cast<const char*>(from.from(row).data) + g * scale_bytes,
                      static_cast<size_t>(scale_bytes));
      }
  }
}

template <class T>
void unpack_columns(const PackArgs& args, int64_t strip) {
  for (int column = 0; column < kStripColumns; ++column) {
    const int64_t row = source_row(args.packed, strip, column);
    if (row >= 0) unpack_column(args.packed, strip, column, args.weight.row<T>(row));
  }
}

// Calls fn with the types of the plain weight and of its tiles.
template <class Fn>
void with_type(const PackArgs& args, Fn fn) {
  args.weight.dtype == DType::f32 ? fn(float{}) : fn(bf16{});
}
template <class Fn>
void with_types(const PackArgs& args, Fn fn) {
  with_type(args, [&](auto t) { args.packed.format == WeightFormat::f32 ? fn(t, float{}) : fn(t, bf16{}); });
}

}  // namespace

void pack_weight(const PackArgs& args) {
  const auto for_each_strip = [&](auto pack) { parallel_for(args.packed.num_strips(), pack); };
  if (is_quantized(args.packed.format))
    for_each_strip([&](int64_t strip) { pack_quantized_strip(args, strip); });
  else if (args.packed.layout == WeightLayout::halves)
    with_type(args, [&](auto t) { for_each_strip([&](int64_t s) { pack_halves_strip<decltype(t)>(args, s); }); });
  else
    with_types(args, [&](auto t, auto p) {
      for_each_strip([&](int64_t strip) { pack_strip<decltype(t), decltype(p)>(args, strip); });
    });
}

void unpack_weight(const PackArgs& args) {
  const auto for_each_strip = [&](auto unpack) { parallel_for(args.packed.num_strips(), unpack); };
  if (is_plain(args.packed))
    with_types(args, [&](auto t, auto p) {
      for_each_strip([&](int64_t strip) { unpack_strip<decltype(t), decltype(p)>(args, strip); });
    });
  else
    with_type(args, [&](auto t) { for_each_strip([&](int64_t s) { unpack_columns<decltype(t)>(args, s); }); });
}

}  // namespace tilewright
