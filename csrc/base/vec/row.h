// Iterates over a row one Vec at a time, the last one partial. Include after a Vec.
#pragma once

#include <cstdint>
#include <type_traits>

namespace tilewright {
namespace {

// Prefetches a line that a later pass will read; invalid addresses are ignored.
inline void prefetch(const void* p) { __builtin_prefetch(p); }

// Calls fn(i, count) for each Vec of a row. The type of count says whether the Vec is whole: a constant except for the
// last.
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

// Calls fn(std::true_type) if a row of outputs is to be streamed and its Vecs are aligned for it, else
// fn(std::false_type).
template <class T, class Fn>
inline void with_streaming(bool wanted, const T* row, Fn fn) {
  if (wanted && reinterpret_cast<uintptr_t>(row) % (Vec::kLanes * sizeof(T)) == 0)
    fn(std::true_type{});
  else
    fn(std::false_type{});
}

template <class T, class Count, class Streaming>
inline void store_some(Vec v, T* p, Count count, Streaming) {
  if constexpr (Streaming::value && !std::is_same_v<Count, int64_t>)
    v.stream(p);
  else
    store_some(v, p, count);
}

// A pair row of bf16 is interleaved already.
inline void load_interleaved(const bf16* p, Vec& even, Vec& odd) { load_pair(p, even, odd); }

// sum = fn(sum, i, count) over each Vec of a row, in four sums that are added at the end: a single one would wait four
// cycles for every addition.
template <class Fn>
inline float accumulate(int64_t width, Fn fn) {
  constexpr std::integral_constant<int, Vec::kLanes> kWhole{};
  Vec a = Vec::zero(), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 4 * Vec::kLanes <= width; i += 4 * Vec::kLanes) {
    a = fn(a, i, kWhole);
    b = fn(b, i + Vec::kLanes, kWhole);
    c = fn(c, i + 2 * Vec::kLanes, kWhole);
    d = fn(d, i + 3 * Vec::kLanes, kWhole);
  }
  for (; i + Vec::kLanes <= width; i += Vec::kLanes) a = fn(a, i, kWhole);
  if (i < width) b = fn(b, i, width - i);
  return reduce_add((a + b) + (c + d));
}

template <class T>
inline float sum_of_squares(const T* x, int64_t width) {
  return accumulate(width, [x](Vec sum, int64_t i, auto count) {
    const Vec v = load_some(x + i, count);
    return fma(v, v, sum);
  });
}

}  // namespace
}  // namespace tilewright
