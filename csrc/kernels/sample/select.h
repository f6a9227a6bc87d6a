// Finds the k-th largest value, or the value at which the largest reach a share of the mass, by histograms over the
// bits of the floats. Include after compare_*.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/vec/math.h"
#include "base/vec/row.h"

namespace tilewright {
namespace {

inline constexpr float kLargest = 3.40282347e+38f;
inline constexpr float kInfinity = __builtin_inff();

// Maps floats to unsigned integers of the same order.
inline uint32_t key_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

inline float value_of(uint32_t key) {
  const uint32_t bits = key >> 31 ? key & 0x7fffffffu : ~key;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// One row of logits.
template <class T>
struct Logits {
  const T* data;
  int64_t size;

  // NaN becomes -inf and +inf the largest float, so that differences are never NaN; -inf past the end.
  template <class Count>
  Vec at(int64_t i, Count count) const {
    // max and min return their second operand if the first is NaN.
    const Vec clean = min(max(load_some(data + i, count), Vec::set1(-kInfinity)), Vec::set1(kLargest));
    if constexpr (std::is_same_v<Count, int64_t>) return keep_lanes(clean, 0, count, Vec::set1(-kInfinity));
    return clean;
  }
  float at(int64_t i) const {
    const float value = to_float(data[i]);
    if (!(value > -kInfinity)) return -kInfinity;
    return value < kLargest ? value : kLargest;
  }
};

// A thread's arrays for one row.
struct Workspace {
  float *maxima, *values, *weights;
  double* block_sums;
  int64_t num_maxima = 0;
};

// Each lane of 32 vectors is a group, whose maximum is kept: k groups with a maximum >= t hold k values >= t, so the
// k-th largest maximum bounds the k-th largest value from below after reading a 32nd of the row.
inline constexpr int64_t kGroupVecs = 32;
inline constexpr int64_t kBlock = 512;  // values per entry of block_sums

inline int64_t most_maxima(int64_t size) { return (size / (kGroupVecs * Vec::kLanes) + 1) * Vec::kLanes; }

// Returns the largest value, and stores the maxima of groups in the workspace.
template <class T>
float find_maxima(Logits<T> row, Workspace& work) {
  Vec largest = Vec::set1(-kInfinity);
  work.num_maxima = 0;
  constexpr int64_t kStep = kGroupVecs * Vec::kLanes;
  for (int64_t begin = 0; begin < row.size; begin += kStep) {
    Vec group = Vec::set1(-kInfinity);
    for_each_vec(row.size - begin < kStep ? row.size - begin : kStep,
                 [&](int64_t i, auto count) { group = max(group, row.at(begin + i, count)); });
    group.store(work.maxima + work.num_maxima);
    work.num_maxima += Vec::kLanes;
    largest = max(largest, group);
  }
  return reduce_max(largest);
}

// Copies the values >= threshold to work.values, in order; returns their number.
template <class T>
int64_t collect(Logits<T> row, float threshold, Workspace& work) {
  int64_t found = 0;
  for_each_vec(row.size, [&](int64_t i, auto count) {
    const Vec v = row.at(i, count);
    uint32_t lanes = lanes_at_least(v, Vec::set1(threshold));
    if constexpr (std::is_same_v<decltype(count), int64_t>) lanes &= (1u << count) - 1;  // the filling is -inf too
    if (!lanes) return;
    store_bits(v, lanes, work.values + found);
    found += __builtin_popcount(lanes);
  });
  return found;
}

// Returns the largest of `values` such that those at or above it weigh at least `target` together (each 1 without
// weights); the smallest if all of them weigh less. Reorders both arrays.
template <bool kWeighted>
float select_from_top(float* values, float* weights, int64_t size, double target) {
  constexpr int kShifts[] = {21, 10, 0};
  uint32_t prefix = 0;
  double above = 0;  // weight of all values above the current bucket
  for (const int shift : kShifts) {
    constexpr uint32_t kBuckets = 2048;
    double sums[kBuckets] = {};
    const auto bucket_of = [&](float value) { return key_of(value) >> shift & (shift ? kBuckets - 1 : 1023u); };
    for (int64_t i = 0; i < size; ++i) sums[bucket_of(values[i])] += kWeighted ? weights[i] : 1.0f;
    uint32_t chosen = 0;
    double before_chosen = above;
    for (int64_t bucket = kBuckets - 1; bucket >= 0; --bucket) {
      if (sums[bucket] == 0) continue;
      chosen = static_cast<uint32_t>(bucket);
      before_chosen = above;
      above += sums[bucket];
      if (above >= target) break;
    }
    above = before_chosen;
    prefix |= chosen << shift;
    int64_t kept = 0;
    for (int64_t i = 0; i < size; ++i) {
      if (bucket_of(values[i]) != chosen) continue;
      if constexpr (kWeighted) weights[kept] = weights[i];
      values[kept++] = values[i];
    }
    size = kept;
  }
  return value_of(prefix);
}

// Returns the k-th largest value, for k in [1, size]; uses up the maxima of an earlier find_maxima.
template <class T>
float kth_largest(Logits<T> row, int64_t k, Workspace& work) {
  const double count = static_cast<double>(k);
  float bound = -kInfinity;
  if (k <= work.num_maxima) bound = select_from_top<false>(work.maxima, nullptr, work.num_maxima, count);
  return select_from_top<false>(work.values, nullptr, collect(row, bound, work), count);
}

}  // namespace
}  // namespace tilewright
