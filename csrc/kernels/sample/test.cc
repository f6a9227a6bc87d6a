// Rows of odd lengths between guard pages, against a sort.
#include "kernels/sample/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "testing/testing.h"

namespace tilewright::testing {
namespace {

constexpr int64_t kSizes[] = {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 129, 512, 513, 1000, 2049};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Indices from the largest value to the smallest, the lower first among equals.
template <class T>
std::vector<int64_t> order_of(const GuardedBuffer<T>& logits) {
  std::vector<int64_t> order(static_cast<size_t>(logits.size()));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return to_float(logits[a]) > to_float(logits[b]); });
  return order;
}

template <class T>
LogitRows rows_of(const GuardedBuffer<T>& logits) {
  return {logits.data(), logits.size(), 1, logits.size(), dtype_of<T>()};
}

struct Filters {
  float temperature;
  int64_t top_k;
  float top_p, min_p;
};

// The distribution of `sample`, in double: 0 for tokens that are not kept.
template <class T>
std::vector<double> distribution(const GuardedBuffer<T>& logits, const Filters& filters) {
  const std::vector<int64_t> order = order_of(logits);
  const double largest = to_float(logits[order[0]]);
  const auto weigh = [&](int64_t i) { return std::exp((to_float(logits[i]) - largest) / filters.temperature); };
  size_t kept = order.size();
  if (filters.top_k > 0) kept = std::min(kept, static_cast<size_t>(filters.top_k));
  while (kept < order.size() && to_float(logits[order[kept]]) == to_float(logits[order[kept - 1]])) ++kept;
  double total = 0, share = 0;
  for (size_t i = 0; i < kept; ++i) total += weigh(order[i]);
  size_t nucleus = 0;
  while (nucleus < kept && (nucleus == 0 || share < filters.top_p * total)) share += weigh(order[nucleus++]);
  while (nucleus < kept && to_float(logits[order[nucleus]]) == to_float(logits[order[nucleus - 1]])) ++nucleus;
  std::vector<double> result(order.size(), 0.0);
  for (size_t i = 0; i < nucleus; ++i)
    if (weigh(order[i]) >= filters.min_p) result[static_cast<size_t>(order[i])] = weigh(order[i]);
  total = std::accumulate(result.begin(), result.end(), 0.0);
  for (double& p : result) p /= total;
  return result;
}

template <class T>
void check_sample(int64_t size, const Filters& filters, Edge edge) {
  Random random(static_cast<uint64_t>(size));
  GuardedBuffer<T> logits(size, edge);
  GuardedBuffer<float> probs(size, edge);
  logits.fill(random, 6.0f);
  SampleArgs args;
  args.logits = rows_of(logits);
  args.temperature = &filters.temperature;
  args.top_k = &filters.top_k;
  args.top_p = &filters.top_p;
  args.min_p = &filters.min_p;
  args.probabilities = probs.data();
  args.probability_stride = size;
  probabilities(args);
  const std::vector<double> expected = distribution(logits, filters);
  check_close(probs.data(), expected.data(), size, 1e-5, "probabilities");

  for (const double uniform : {0.0, 0.3, 0.77, 1 - 1e-9}) {
    int64_t token = -1;
    args.uniform = &uniform;
    args.token_ids = &token;
    sample(args);
    CHECK(token >= 0 && token < size);
    double below = 0;
    for (int64_t i = 0; i < token; ++i) below += expected[static_cast<size_t>(i)];
    CHECK(below <= uniform + 1e-5 && uniform <= below + expected[static_cast<size_t>(token)] + 1e-5);
  }
}

TEST(sample_of_odd_sizes) {
  constexpr Filters kFilters[] = {
      {1, 0, 1, 0}, {0.7f, 5, 1, 0}, {1.3f, 0, 0.8f, 0}, {1, 0, 1, 0.05f}, {1, 40, 0.5f, 0}};
  for_each_isa([&] {
    for (const int64_t size : kSizes)
      for (const Filters& filters : kFilters)
        for (const Edge edge : {Edge::end, Edge::start}) {
          check_sample<float>(size, filters, edge);
          check_sample<bf16>(size, filters, edge);
        }
  });
}

template <class T>
void check_log_probs(int64_t size, int64_t top_n, Edge edge) {
  Random random(static_cast<uint64_t>(size + top_n));
  GuardedBuffer<T> logits(size, edge);
  logits.fill(random, 6.0f);
  for (int64_t i = 0; i < size; i += 3) assign(logits[i], std::round(to_float(logits[i])));  // some ties
  GuardedBuffer<float> top(top_n, edge), token_log_prob(1, edge);
  GuardedBuffer<int64_t> top_ids(top_n, edge), rank(1, edge);
  const int64_t token = size / 2;
  LogProbArgs args;
  args.logits = rows_of(logits);
  args.token_ids = &token;
  args.token_log_probs = token_log_prob.data();
  args.ranks = rank.data();
  args.top_n = top_n;
  args.top_ids = top_ids.data();
  args.top_log_probs = top.data();
  log_probs(args);

  const std::vector<int64_t> order = order_of(logits);
  double total = 0;
  for (const int64_t i : order) total += std::exp(static_cast<double>(to_float(logits[i])));
  for (int64_t i = 0; i < top_n; ++i) {
    CHECK(top_ids[i] == order[static_cast<size_t>(i)]);
    CHECK(std::fabs(top[i] - (to_float(logits[top_ids[i]]) - std::log(total))) < 1e-5);
  }
  CHECK(std::fabs(token_log_prob[0] - (to_float(logits[token]) - std::log(total))) < 1e-5);
  CHECK(order[static_cast<size_t>(rank[0] - 1)] == token);
}

TEST(log_probs_of_odd_sizes) {
  for_each_isa([] {
    for (const int64_t size : kSizes)
      for (const int64_t top_n : {int64_t{1}, std::min<int64_t>(size, 20), size})
        for (const Edge edge : {Edge::end, Edge::start}) {
          check_log_probs<float>(size, top_n, edge);
          check_log_probs<bf16>(size, top_n, edge);
        }
  });
}

TEST(nan_is_never_drawn) {
  for_each_isa([] {
    for (const int64_t size : kSizes) {
      GuardedBuffer<float> logits(size);
      const float temperature = 1, top_p = 0.9f, min_p = 0;
      const int64_t top_k = 3;
      for (const int64_t finite : {int64_t{-1}, size - 1}) {
        for (int64_t i = 0; i < size; ++i) logits[i] = i == finite ? -5.0f : kNan;
        const double uniform = 0.5;
        int64_t token = -1;
        sample({rows_of(logits), &temperature, &top_k, &top_p, &min_p, &uniform, &token});
        CHECK(token == (finite < 0 ? 0 : finite));
      }
    }
  });
}

// Each row's words end at the guard page, and bits past the vocabulary are set in the last one.
void check_mask(int64_t size, Edge edge) {
  constexpr int64_t kRows = 4, kMasked = 2;
  constexpr int64_t rows[kMasked] = {3, 1};
  const int64_t num_words = (size + 31) / 32;
  Random random(static_cast<uint64_t>(size));
  GuardedBuffer<float> logits(kRows * size, edge);
  GuardedBuffer<int32_t> words(kMasked * num_words, edge);
  logits.fill(random);
  logits[size] = kNan;
  for (int64_t i = 0; i < words.size(); ++i)
    words[i] = i % 4 == 0 ? -1 : i % 4 == 1 ? 0 : static_cast<int32_t>(0x9e3779b9u * static_cast<uint32_t>(i + size));
  std::vector<float> before(logits.data(), logits.data() + logits.size());
  mask({{logits.data(), size, kRows, size, DType::f32}, rows, kMasked, words.data(), num_words});
  for (int64_t row = 0; row < kRows; ++row)
    for (int64_t i = 0; i < size; ++i) {
      const int64_t entry = row == rows[0] ? 0 : row == rows[1] ? 1 : -1;
      const bool kept = entry < 0 || (words[entry * num_words + i / 32] >> (i % 32) & 1);
      const float expected = before[static_cast<size_t>(row * size + i)], actual = logits[row * size + i];
      CHECK(kept ? actual == expected || (std::isnan(actual) && std::isnan(expected))
                 : actual == -std::numeric_limits<float>::infinity());
    }
}

TEST(mask_of_odd_sizes) {
  for_each_isa([] {
    for (const int64_t size : kSizes)
      for (const Edge edge : {Edge::end, Edge::start}) check_mask(size, edge);
    check_mask(40000, Edge::end);
  });
}

TEST(penalties_touch_the_listed_tokens) {
  GuardedBuffer<float> logits(5);
  for (int64_t i = 0; i < 5; ++i) logits[i] = static_cast<float>(i) - 2;
  const int64_t starts[] = {0, 3}, ids[] = {0, 4, 2}, bias_starts[] = {0, 2}, bias_ids[] = {4, 1};
  const int32_t counts[] = {2, 0, 1};
  const float repetition = 2, presence = 0.5f, frequency = 0.25f, bias[] = {10, -3};
  penalize({rows_of(logits), starts, ids, counts, &repetition, &presence, &frequency, bias_starts, bias_ids, bias});
  const float expected[] = {-5, -4, -0.75f, 1, 11};
  for (int64_t i = 0; i < 5; ++i) CHECK(logits[i] == expected[i]);
}

}  // namespace
}  // namespace tilewright::testing
