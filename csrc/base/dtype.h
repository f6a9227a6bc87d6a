// The element types that cross the binding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace tilewright {

struct bf16;  // base/bf16.h

enum class DType : int { f32, bf16, u8, i32, i64, boolean, f64, f16 };

inline constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32: return 4;
    case DType::bf16:
    case DType::f16: return 2;
    case DType::i64:
    case DType::f64: return 8;
    default: return 1;
  }
}

inline constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return "float32";
    case DType::bf16: return "bfloat16";
    case DType::u8: return "uint8";
    case DType::i32: return "int32";
    case DType::i64: return "int64";
    case DType::boolean: return "bool";
    case DType::f64: return "float64";
    case DType::f16: return "float16";
  }
  return "?";
}

// Templates distinguish bf16 from fp32 by the type, never by its size, which other types share.
template <class T>
inline constexpr bool kIsBf16 = std::is_same_v<T, bf16>;

// The DType of a C++ type. consteval, so that no file of an ISA level leaves a copy for the linker.
template <class T>
consteval DType dtype_of() {
  static_assert(kIsBf16<T> || std::is_same_v<T, float>, "no kernel is a template of other types");
  return kIsBf16<T> ? DType::bf16 : DType::f32;
}

}  // namespace tilewright
