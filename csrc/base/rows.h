// Tensors as kernel arguments: address, strides and type of rows. Plain data, so that a recorded call holds a copy; an
// operand that is only read is a void* as well, so that one struct serves both.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/tile.h"

namespace tilewright {

// [T, D], or nothing.
struct Rows {
  void* data = nullptr;
  int64_t stride = 0;  // elements from row to row
  DType dtype = DType::f32;

  TILEWRIGHT_INLINE explicit operator bool() const { return data != nullptr; }

  template <class T>
  TILEWRIGHT_INLINE T* row(int64_t index) const {
    return static_cast<T*>(data) + index * stride;
  }
  // The rows from `index` on.
  TILEWRIGHT_INLINE Rows from(int64_t index) const {
    return {static_cast<char*>(data) + index * stride * static_cast<int64_t>(size_of(dtype)), stride, dtype};
  }
};

// [T, H, K], or nothing: slices of a packed qkv row have separate strides for tokens and heads.
struct Heads {
  void* data = nullptr;
  int64_t token_stride = 0, head_stride = 0;  // in elements
  DType dtype = DType::f32;

  TILEWRIGHT_INLINE explicit operator bool() const { return data != nullptr; }

  template <class T>
  TILEWRIGHT_INLINE T* row(int64_t token, int64_t head) const {
    return static_cast<T*>(data) + token * token_stride + head * head_stride;
  }
};

}  // namespace tilewright
