// Walking a row one Vec at a time, the last one partial. Include after one of scalar.h, avx2.h, avx512.h.
#pragma once

#include <cstdint>
#include <type_traits>

namespace tilewright {
namespace {

// fn(i, count) for each Vec of a row. The type of count says whether the Vec is whole: a constant but for the last.
template <class Fn>
inline void for_each_vec(int64_t width, Fn fn) {
  int64_t i = 0;
  for (; i + Vec::kLanes <= width; i += Vec::kLanes) fn(i, std::integral_constant<int, Vec::kLanes>{});
  if (i < width) fn(i, width - i);
}

template <class T, class Count>
inline Vec load_some(const T* p, Count count) {
  if constexpr (std::is_same_v<Count, int64_t>)
    return Vec::load(p, count);
  else
    return Vec::load(p);
}

template <class T, class Count>
inline void store_some(Vec v, T* p, Count count) {
  if constexpr (std::is_same_v<Count, int64_t>)
    v.store(p, count);
  else
    v.store(p);
}

}  // namespace
}  // namespace tilewright
