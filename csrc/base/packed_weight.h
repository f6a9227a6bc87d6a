// A packed weight and all that is needed to read it: how its values are stored, how they lie, and their shape.
//
// Another format (int8, say) is another WeightFormat, with a group_size and scales, and kernels that read it; another
// layout another WeightLayout. The pack cache's key follows from both (ops/packed.py).
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/tile.h"

namespace tilewright {

// How a value is stored.
enum class WeightFormat : int { f32, bf16 };

inline constexpr WeightFormat kWeightFormats[] = {WeightFormat::f32, WeightFormat::bf16};

// The type of the elements that hold a format's values.
inline constexpr DType storage_of(WeightFormat format) {
  return format == WeightFormat::bf16 ? DType::bf16 : DType::f32;
}

inline constexpr const char* name_of(WeightFormat format) { return name_of(storage_of(format)); }

template <class T>
inline constexpr WeightFormat kFormatOf = kIsBf16<T> ? WeightFormat::bf16 : WeightFormat::f32;

// How the values lie.
enum class WeightLayout : int { tiles };  // base/tile.h

inline constexpr const char* name_of(WeightLayout) { return "tiles of 32 x 16 in pairs, strips of 32"; }

struct PackedWeight {
  void* data = nullptr;          // elements() of storage_of(format); of several experts one after the other
  const void* scales = nullptr;  // one for each group_size values of a row; null: the format has none
  int64_t group_size = 0;
  WeightFormat format = WeightFormat::f32;
  WeightLayout layout = WeightLayout::tiles;
  int64_t n = 0, k = 0;  // rows and columns of W [N, K]
  bool gated = false;    // rows [0, n/2) are gate, [n/2, n) up: act(gate) * up has n / 2 columns

  TILEWRIGHT_INLINE int64_t out_features() const { return gated ? n / 2 : n; }
  TILEWRIGHT_INLINE int64_t num_strips() const {
    return ceil_div(out_features(), gated ? kTileColumns : kStripColumns);
  }
  TILEWRIGHT_INLINE int64_t num_depth_tiles() const { return ceil_div(k, kTileDepth); }
  TILEWRIGHT_INLINE int64_t strip_elements() const { return num_depth_tiles() * 2 * kTileElements; }
  TILEWRIGHT_INLINE int64_t elements() const { return num_strips() * strip_elements(); }
  TILEWRIGHT_INLINE int64_t size_bytes() const {
    return elements() * static_cast<int64_t>(size_of(storage_of(format)));
  }

  template <class T>
  TILEWRIGHT_INLINE T* strip(int64_t index) const {
    return static_cast<T*>(data) + index * strip_elements();
  }
};

}  // namespace tilewright
