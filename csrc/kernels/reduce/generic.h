// A span of the sum in terms of Vec; each ISA file includes this after its Vec.
#pragma once

#include "base/vec/row.h"
#include "kernels/reduce/reduce.h"

namespace tilewright {
namespace {

template <class T>
inline T* at(const void* data, int64_t offset) {
  return static_cast<T*>(const_cast<void*>(data)) + offset;
}

// kVecs adjacent Vecs of each summand: enough loads in flight to hide the latency of another core's cache.
template <class X, class T, int kVecs, class Count>
inline void reduce_block(const ReduceArgs& args, int64_t i, Count count) {
  Vec sums[kVecs];
  const auto add = [&](const auto* x) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) sums[v] = sums[v] + load_some(x + v * Vec::kLanes, count);
  };
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) sums[v] = load_some(at<const X>(args.x[0], i + v * Vec::kLanes), count);
  for (int summand = 1; summand < args.num_summands; ++summand) add(at<const X>(args.x[summand], i));
  if (args.addend) add(at<const T>(args.addend, i));
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) {
    store_some(sums[v], at<T>(args.out, i + v * Vec::kLanes), count);
    if (args.copy) store_some(sums[v], at<T>(args.copy, i + v * Vec::kLanes), count);
  }
}

template <class X, class T>
void reduce_typed(const ReduceArgs& args, int64_t begin, int64_t end) {
  constexpr int kVecs = 4;
  constexpr std::integral_constant<int, Vec::kLanes> kWhole{};
  int64_t i = begin;
  for (; i + kVecs * Vec::kLanes <= end; i += kVecs * Vec::kLanes) reduce_block<X, T, kVecs>(args, i, kWhole);
  for (; i + Vec::kLanes <= end; i += Vec::kLanes) reduce_block<X, T, 1>(args, i, kWhole);
  if (i < end) reduce_block<X, T, 1>(args, i, end - i);
}

void reduce_elements(const ReduceArgs& args, int64_t begin, int64_t end) {
  if (args.x_dtype == DType::bf16) return reduce_typed<bf16, bf16>(args, begin, end);
  args.dtype == DType::f32 ? reduce_typed<float, float>(args, begin, end) : reduce_typed<float, bf16>(args, begin, end);
}

}  // namespace
}  // namespace tilewright
