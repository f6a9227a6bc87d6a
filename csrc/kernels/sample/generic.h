// Sampling in terms of Vec; each ISA file includes this after its Vec and its comparisons.
#pragma once

#include <cmath>

#include "base/scratch.h"
#include "base/tile.h"
#include "kernels/sample/sample.h"
#include "kernels/sample/select.h"

namespace tilewright {
namespace {

inline Workspace workspace(int64_t vocabulary) {
  const int64_t num_blocks = ceil_div(vocabulary, kBlock);
  const int64_t values = round_up(vocabulary + Vec::kLanes, 16), maxima = round_up(most_maxima(vocabulary), 16);
  auto* memory = static_cast<char*>(thread_scratch(static_cast<size_t>(num_blocks * 8 + (2 * values + maxima) * 4)));
  Workspace work;
  work.block_sums = reinterpret_cast<double*>(memory);
  work.maxima = reinterpret_cast<float*>(memory + num_blocks * 8);
  work.values = work.maxima + maxima;
  work.weights = work.values + values;
  return work;
}

template <class T>
Logits<T> row_of(const LogitRows& logits, int64_t row) {
  return {static_cast<const T*>(logits.data) + row * logits.stride, logits.vocabulary};
}

// The kept tokens, and their weights: e^((x - largest) / temperature) for x >= threshold.
struct Filter {
  float largest, inverse_temperature, threshold;

  bool keeps_nothing() const { return largest == -kInfinity; }
  Vec weigh(Vec v) const { return exp((v - Vec::set1(largest)) * Vec::set1(inverse_temperature)); }
  uint32_t kept(Vec v) const { return lanes_at_least(v, Vec::set1(threshold)); }
};

// Returns the sum of weights of values [begin, end) of a row, in fp32: at most a few hundred values, so that the error
// stays 1e-6.
template <class T>
double weight_of(Logits<T> row, const Filter& filter, int64_t begin, int64_t end) {
  Vec sum = Vec::zero();
  for_each_vec(end - begin, [&](int64_t i, auto count) {
    const Vec v = row.at(begin + i, count);
    const uint32_t kept = filter.kept(v);
    if (kept) sum = sum + keep_bits(filter.weigh(v), kept);
  });
  return reduce_add(sum);
}

// Computes sums of weights per block; returns their total.
template <class T>
double weigh_blocks(Logits<T> row, const Filter& filter, Workspace& work) {
  double total = 0;
  for (int64_t begin = 0; begin < row.size; begin += kBlock) {
    const int64_t end = begin + kBlock < row.size ? begin + kBlock : row.size;
    const double sum = weight_of(row, filter, begin, end);
    work.block_sums[begin / kBlock] = sum;
    total += sum;
  }
  return total;
}

// Returns the threshold of top-p among what the filter keeps.
template <class T>
float top_p_threshold(Logits<T> row, const Filter& filter, float temperature, float top_p, Workspace& work) {
  const double total = weigh_blocks(row, filter, work);
  // All values below this bound together weigh less than (1 - p) * total, so the threshold is not among them.
  const double bound = std::log((1.0 - top_p) * total / static_cast<double>(row.size)) * temperature + filter.largest;
  // Lowered for the rounding of exp and of the bound itself.
  const float lowered = static_cast<float>(bound - 1e-5 * (temperature + std::fabs(bound)));
  const int64_t size = collect(row, lowered > filter.threshold ? lowered : filter.threshold, work);
  for_each_vec(size, [&](int64_t i, auto count) {
    store_some(filter.weigh(load_some(work.values + i, count)), work.weights + i, count);
  });
  return select_from_top<true>(work.values, work.weights, size, top_p * total);
}

template <class T>
Filter make_filter(const SampleArgs& args, Logits<T> row, int64_t index, Workspace& work) {
  Filter filter;
  filter.largest = find_maxima(row, work);
  filter.threshold = filter.largest;
  filter.inverse_temperature = 1.0f;
  if (filter.keeps_nothing() || args.temperature[index] == 0.0f) return filter;
  const float temperature = args.temperature[index] > 1e-30f ? args.temperature[index] : 1e-30f;
  filter.inverse_temperature = 1.0f / temperature;
  filter.threshold = -kLargest;  // -inf is never kept
  const auto raise = [&](float threshold) {
    if (threshold > filter.threshold) filter.threshold = threshold;
  };
  raise(filter.largest - 87.0f * temperature);  // below that exp returns its smallest value instead of 0
  if (args.top_k[index] > 0 && args.top_k[index] < row.size) raise(kth_largest(row, args.top_k[index], work));
  if (args.top_p[index] < 1.0f) raise(top_p_threshold(row, filter, temperature, args.top_p[index], work));
  if (args.min_p[index] > 0.0f) raise(filter.largest + std::log(args.min_p[index]) * temperature);
  return filter;
}

// Returns the first index at or above the filter's threshold.
template <class T>
int64_t first_kept(Logits<T> row, const Filter& filter) {
  if (filter.keeps_nothing()) return 0;
  for (int64_t i = 0; i < row.size; i += Vec::kLanes) {
    const int64_t left = row.size - i;
    const uint32_t kept = filter.kept(row.at(i, left));
    if (kept) return i + __builtin_ctz(kept);
  }
  return 0;
}

// Returns the first index at which the running sum of weights exceeds uniform * total.
template <class T>
int64_t pick(Logits<T> row, const Filter& filter, double uniform, Workspace& work) {
  const double target = uniform * weigh_blocks(row, filter, work);
  double sum = 0;
  int64_t block = 0;
  while ((block + 1) * kBlock < row.size && !(sum + work.block_sums[block] > target)) sum += work.block_sums[block++];
  int64_t last_kept = 0;
  for (int64_t begin = block * kBlock; begin < row.size; begin += Vec::kLanes) {
    const Vec v = row.at(begin, row.size - begin);
    float weights[Vec::kLanes];
    filter.weigh(v).store(weights);
    for (uint32_t kept = filter.kept(v); kept; kept &= kept - 1) {
      const int lane = __builtin_ctz(kept);
      last_kept = begin + lane;
      sum += weights[lane];
      if (sum > target) return last_kept;
    }
  }
  return last_kept;  // added one by one the block may sum to a rounding step less
}

template <class T>
int64_t sample_row(const SampleArgs& args, int64_t index, Workspace& work) {
  const Logits<T> row = row_of<T>(args.logits, index);
  const Filter filter = make_filter(args, row, index, work);
  if (filter.keeps_nothing() || args.temperature[index] == 0.0f) return first_kept(row, filter);
  return pick(row, filter, args.uniform[index], work);
}

template <class T>
void probability_row(const SampleArgs& args, int64_t index, Workspace& work) {
  const Logits<T> row = row_of<T>(args.logits, index);
  float* out = args.probabilities + index * args.probability_stride;
  const Filter filter = make_filter(args, row, index, work);
  if (filter.keeps_nothing() || args.temperature[index] == 0.0f) {
    for_each_vec(row.size, [&](int64_t i, auto count) { store_some(Vec::zero(), out + i, count); });
    out[first_kept(row, filter)] = 1.0f;
    return;
  }
  const Vec scale = Vec::set1(static_cast<float>(1.0 / weigh_blocks(row, filter, work)));
  for_each_vec(row.size, [&](int64_t i, auto count) {
    const Vec v = row.at(i, count);
    const uint32_t kept = filter.kept(v);
    store_some(kept ? keep_bits(filter.weigh(v) * scale, kept) : Vec::zero(), out + i, count);
  });
}

// Returns how many of values [begin, end) are at or above a threshold.
template <class T>
int64_t count_at_least(Logits<T> row, float threshold, int64_t begin, int64_t end) {
  int64_t count = 0;
  const Logits<T> part = {row.data + begin, end - begin};
  for_each_vec(part.size, [&](int64_t i, auto width) {
    uint32_t lanes = lanes_at_least(part.at(i, width), Vec::set1(threshold));
    if constexpr (std::is_same_v<decltype(width), int64_t>) lanes &= (1u << width) - 1;
    count += __builtin_popcount(lanes);
  });
  return count;
}

// Collects the top_n of a row, unordered: all above the n-th largest, and of its equals those with the lowest indices.
template <class T>
void collect_top(Logits<T> row, float nth_largest, int64_t top_n, int64_t* ids) {
  // Those above fill the list from the front and the equals from the back; when they meet, the latest equal is dropped.
  int64_t num_above = 0, num_equal = 0;
  for_each_vec(row.size, [&](int64_t i, auto count) {
    uint32_t lanes = lanes_at_least(row.at(i, count), Vec::set1(nth_largest));
    if constexpr (std::is_same_v<decltype(count), int64_t>) lanes &= (1u << count) - 1;
    for (; lanes; lanes &= lanes - 1) {
      const int64_t index = i + __builtin_ctz(lanes);
      const bool full = num_above + num_equal == top_n;
      if (row.at(index) > nth_largest) {
        num_equal -= full;
        ids[num_above++] = index;
      } else if (!full) {
        ids[top_n - ++num_equal] = index;
      }
    }
  });
}

template <class T>
void log_prob_row(const LogProbArgs& args, int64_t index, Workspace& work) {
  const Logits<T> row = row_of<T>(args.logits, index);
  const float largest = find_maxima(row, work);
  // Without a finite value every log-probability is -inf.
  const Filter all = {largest > -kLargest ? largest : -kLargest, 1.0f, -kLargest};
  const double total = weigh_blocks(row, all, work);
  const float log_total = total > 0 ? static_cast<float>(std::log(total)) : 0.0f;
  const auto log_prob = [&](int64_t token) { return (row.at(token) - all.largest) - log_total; };

  const int64_t token = args.token_ids[index];
  const float value = row.at(token) == 0.0f ? 0.0f : row.at(token);  // -0 is as large as 0
  args.token_log_probs[index] = log_prob(token);
  args.ranks[index] =
      1 + count_at_least(row, value, 0, token) + count_at_least(row, value_of(key_of(value) + 1), token + 1, row.size);
  if (args.top_n == 0) return;
  int64_t* ids = args.top_ids + index * args.top_n;
  collect_top(row, kth_largest(row, args.top_n, work), args.top_n, ids);
  for (int64_t i = 0; i < args.top_n; ++i) args.top_log_probs[index * args.top_n + i] = log_prob(ids[i]);
}

// Calls fn(T{}) for the element type of the logits.
template <class Fn>
inline void with_type(const LogitRows& logits, Fn fn) {
  if (logits.dtype == DType::bf16) return fn(bf16{});
  return fn(float{});
}

void sample_rows(const SampleArgs& args, int64_t begin, int64_t end) {
  Workspace work = workspace(args.logits.vocabulary);
  with_type(args.logits, [&](auto t) {
    for (int64_t row = begin; row < end; ++row) args.token_ids[row] = sample_row<decltype(t)>(args, row, work);
  });
}

void probability_rows(const SampleArgs& args, int64_t begin, int64_t end) {
  Workspace work = workspace(args.logits.vocabulary);
  with_type(args.logits, [&](auto t) {
    for (int64_t row = begin; row < end; ++row) probability_row<decltype(t)>(args, row, work);
  });
}

void log_prob_rows(const LogProbArgs& args, int64_t begin, int64_t end) {
  Workspace work = workspace(args.logits.vocabulary);
  with_type(args.logits, [&](auto t) {
    for (int64_t row = begin; row < end; ++row) log_prob_row<decltype(t)>(args, row, work);
  });
}

// Sets every value whose bit is 0 to -inf. Most words are all ones within a text and all zeros within a keyword: values
// of the former are not even read.
void mask_values(float* logits, const int32_t* words, int64_t size) {
  const Vec nothing = Vec::set1(-kInfinity);
  for (int64_t begin = 0; begin < size; begin += 32) {
    const uint32_t word = static_cast<uint32_t>(words[begin / 32]);
    if (word == ~0u) continue;
    for_each_vec(size - begin < 32 ? size - begin : 32, [&](int64_t i, auto count) {
      float* at = logits + begin + i;
      store_some(word ? select_bits(load_some(at, count), nothing, word >> i) : nothing, at, count);
    });
  }
}

}  // namespace
}  // namespace tilewright
