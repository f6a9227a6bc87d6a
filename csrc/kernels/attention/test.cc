// Attention of every level against plain loops in double, over pages full of NaN where no token is, between guard
// pages.
#include "kernels/attention/attention.h"

#include <cmath>
#include <initializer_list>
#include <vector>

#include "base/parallel.h"
#include "kernels/kv_cache/kv_cache.h"
#include "testing/testing.h"

namespace tilewright::testing {
namespace {

struct Case {
  int64_t heads, kv_heads, width;
  std::vector<int32_t> queries, keys;  // per sequence
  bool causal;
  int64_t window;
  float soft_cap;
  float q_size = 1.0f, k_size = 1.0f, v_size = 1.0f;  // powers of two that the inputs are multiplied by
  int64_t nan_key = -1;                               // a key, counted through all sequences, that has a NaN
};

std::vector<int32_t> starts_of(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> starts = {0};
  for (int32_t length : lengths) starts.push_back(starts.back() + length);
  return starts;
}

// One query row of head h in double, as a multiple of v_size.
template <class T>
std::vector<double> attend(const Case& c, const T* q, const GuardedBuffer<T>& k, const GuardedBuffer<T>& v,
                           int64_t first_key, int64_t num_keys, int64_t position, int64_t head, double scale) {
  const int64_t kv_head = head / (c.heads / c.kv_heads);
  std::vector<double> out(c.width, 0.0), scores(num_keys, -1e300);
  double highest = -1e300, total = 0;
  for (int64_t j = 0; j < num_keys; ++j) {
    const int64_t distance = position - j;
    if (c.causal && distance < 0) continue;
    if (c.window > 0 && std::abs(distance) >= c.window) continue;
    double score = 0;
    for (int64_t d = 0; d < c.width; ++d)
      score += double{to_float(q[d])} * to_float(k[((first_key + j) * c.kv_heads + kv_head) * c.width + d]);
    score *= scale;
    if (c.soft_cap > 0) score = c.soft_cap * std::tanh(score / c.soft_cap);
    scores[j] = score;
    highest = std::max(highest, score);
  }
  for (int64_t j = 0; j < num_keys; ++j) {
    if (scores[j] == -1e300) continue;
    const double weight = std::exp(scores[j] - highest);
    total += weight;
    for (int64_t d = 0; d < c.width; ++d)
      out[d] += weight * to_float(v[((first_key + j) * c.kv_heads + kv_head) * c.width + d]);
  }
  for (double& x : out) x = total == 0 ? 0.0 : x / total / c.v_size;
  return out;
}

// Returns the e4m3 nearest to a value, by trying all of them; of two equally near, the even one.
double nearest_fp8(double value) {
  double best = 0, distance = 1e300;
  for (int code = 0; code < 127; ++code) {
    const double size = code < 8 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, code / 8 - 10);
    const double now = std::abs(std::abs(value) - size);
    if (now < distance || (now == distance && code % 2 == 0)) best = size, distance = now;
  }
  return value < 0 ? -best : best;
}

// Rounds a row as pages in 8 bits do.
template <class T>
void round_row(T* row, int64_t width, KvFormat format) {
  const float largest = format == KvFormat::int8 ? 127.0f : 448.0f;
  float highest = 0;
  for (int64_t d = 0; d < width; ++d) highest = std::max(highest, std::abs(to_float(row[d])));
  for (int64_t d = 0; d < width; ++d) {
    const double scaled = to_float(row[d]) * (largest / highest);
    const double number = format == KvFormat::int8 ? std::nearbyint(scaled) : nearest_fp8(scaled);
    assign(row[d], to_float(to_bf16(static_cast<float>(number) * (highest / largest))));
  }
}

// Inputs of a case: the same numbers at either edge.
template <class T>
struct Inputs {
  Inputs(const Case& c, Edge edge)
      : query_starts(starts_of(c.queries)),
        key_starts(starts_of(c.keys)),
        tokens(query_starts.back()),
        keys(key_starts.back()),
        q(tokens * c.heads * c.width, edge),
        k(keys * c.kv_heads * c.width, edge),
        v(keys * c.kv_heads * c.width, edge) {
    Random random(static_cast<uint64_t>(tokens * 31 + keys));
    q.fill(random, c.q_size);
    k.fill(random, c.k_size);
    v.fill(random, c.v_size);
    for (int64_t head = 0; head < c.kv_heads && c.nan_key >= 0; ++head)
      assign(k[(c.nan_key * c.kv_heads + head + 1) * c.width - 1], __builtin_nanf(""));
  }

  std::vector<int32_t> query_starts, key_starts;
  int64_t tokens, keys;
  GuardedBuffer<T> q, k, v;
};

template <class T>
std::vector<double> by_definition(const Case& c, KvFormat format = KvFormat::same) {
  Inputs<T> in(c, Edge::end);
  if (format != KvFormat::same)
    for (int64_t row = 0; row < in.keys * c.kv_heads; ++row) {
      round_row(in.k.data() + row * c.width, c.width, format);
      round_row(in.v.data() + row * c.width, c.width, format);
    }
  std::vector<double> expected;
  for (size_t b = 0; b < c.queries.size(); ++b)
    for (int64_t i = 0; i < c.queries[b]; ++i)
      for (int64_t h = 0; h < c.heads; ++h) {
        const T* q = in.q.data() + ((in.query_starts[b] + i) * c.heads + h) * c.width;
        const auto row = attend(c, q, in.k, in.v, in.key_starts[b], c.keys[b], c.keys[b] - c.queries[b] + i, h, 0.3);
        expected.insert(expected.end(), row.begin(), row.end());
      }
  return expected;
}

template <class T>
void check_case(const Case& c, Edge edge, bool paged, const std::vector<double>& expected,
                KvFormat format = KvFormat::same) {
  const Inputs<T> in(c, edge);
  const int64_t sequences = static_cast<int64_t>(c.queries.size());
  GuardedBuffer<T> out(in.q.size(), edge);

  VarlenArgs args = {};
  AttentionArgs& attention = args.attention;
  attention.q = heads_of(in.q, c.heads * c.width, c.width);
  attention.out = heads_of(out, c.heads * c.width, c.width);
  attention.kv_dtype = dtype_of<T>();
  attention.layout = {0, c.kv_heads, c.width, format};
  attention.query_starts = in.query_starts.data();
  attention.num_sequences = sequences;
  attention.num_heads = c.heads;
  attention.causal = c.causal;
  attention.window = c.window;
  attention.soft_cap = c.soft_cap;
  attention.scale = 0.3f;
  args.k = heads_of(in.k, c.kv_heads * c.width, c.width);
  args.v = heads_of(in.v, c.kv_heads * c.width, c.width);
  args.key_starts = in.key_starts.data();

  if (!paged) {
    varlen_attention(args);
  } else {
    constexpr int64_t kPage = 64;
    attention.layout.page_size = kPage;
    std::vector<int32_t> table;
    int64_t width = 1, pages = 0;
    for (int32_t length : c.keys) width = std::max(width, ceil_div(length, kPage));
    table.assign(sequences * width, -1);
    std::vector<int64_t> slots(in.keys);
    for (int64_t b = sequences - 1; b >= 0; --b) {  // last sequence first: pages are not in order
      for (int64_t j = 0; j < c.keys[b]; ++j) {
        if (j % kPage == 0) table[b * width + j / kPage] = static_cast<int32_t>(pages++);
        slots[in.key_starts[b] + j] = (pages - 1) * kPage + j % kPage;
      }
    }
    const int64_t elements = pages * attention.layout.page_elements();
    GuardedBuffer<T> cache(format == KvFormat::same ? elements : ceil_div(elements, sizeof(T)), edge);
    kv_store({args.k, args.v, cache.data(), dtype_of<T>(), attention.layout, slots.data(), in.keys});
    attention.pages = cache.data();
    attention.block_table = table.data();
    attention.block_table_stride = width;
    attention.kv_lengths = c.keys.data();
    paged_attention(attention);
  }
  // NaN, which check_close never accepts, is replaced by a number that is no output, if a case expects it.
  constexpr float kNanAsNumber = 1e6f;
  std::vector<double> numbers = expected;
  for (int64_t i = 0; i < out.size(); ++i) {
    const float got = to_float(out[i]) / c.v_size;
    assign(out[i], c.nan_key >= 0 && std::isnan(got) ? kNanAsNumber : got);
    if (std::isnan(numbers[i])) numbers[i] = kNanAsNumber;
  }
  check_close(out.data(), numbers.data(), out.size(), kIsBf16<T> || format != KvFormat::same ? 0.01 : 1e-4,
              paged ? "paged attention" : "varlen attention");
}

// Checks every level. Plain loops in double take longer than all of them: their result is computed once.
template <class T>
void check_levels(const Case& c, std::initializer_list<Edge> edges, std::initializer_list<bool> forms) {
  const std::vector<double> expected = by_definition<T>(c);
  for_each_isa([&] {
    for (Edge edge : edges)
      for (bool paged : forms) check_case<T>(c, edge, paged, expected);
  });
}

const std::vector<Case> kCases = {
    {2, 1, 16, {1, 33}, {1, 33}, true, 0, 0.0f},  {3, 3, 72, {20, 0, 3}, {20, 5, 300}, false, 0, 0.0f},
    {4, 2, 40, {1, 9}, {290, 40}, true, 7, 2.0f}, {5, 1, 24, {8}, {270}, false, 100, 0.0f},
    {2, 2, 129, {1, 2}, {65, 2}, true, 0, 0.0f},
};

TEST(attention) {
  for (const Case& c : kCases) {
    check_levels<float>(c, {Edge::end, Edge::start}, {false, true});
    check_levels<bf16>(c, {Edge::end, Edge::start}, {false, true});
  }
}

// Pages are NaN except where tokens are; for bytes, the scales are.
TEST(keys_and_values_in_8_bits) {
  std::vector<Case> cases = kCases;
  cases.push_back({2, 1, 32, {1}, {1600}, true, 0, 0.0f});
  cases.push_back({2, 1, 24, {205}, {650}, true, 0, 0.0f});
  for (const Case& c : cases)
    for (KvFormat format : {KvFormat::int8, KvFormat::fp8}) {
      const std::vector<double> wide = by_definition<float>(c, format), narrow = by_definition<bf16>(c, format);
      for_each_isa([&] {
        for (Edge edge : {Edge::end, Edge::start}) {
          check_case<float>(c, edge, true, wide, format);
          check_case<bf16>(c, edge, true, narrow, format);
        }
      });
    }
}

// An intermediate type with a smaller range than bf16 must not affect results.
TEST(inputs_of_any_size) {
  for (float size : {0x1p-60f, 0x1p60f})
    for (float v_size : {0x1p30f, 0x1p110f})
      check_levels<bf16>({2, 1, 40, {9, 70}, {9, 70}, false, 0, 0.0f, size, 1 / size, v_size}, {Edge::end},
                         {false, true});
}

// Long enough that a decode step is split among items and merged.
TEST(decode_over_many_blocks) {
  check_levels<float>({2, 1, 32, {1}, {1600}, true, 0, 0.0f}, {Edge::end}, {true});
  check_levels<bf16>({2, 1, 32, {1}, {1600}, true, 0, 0.0f}, {Edge::end}, {true});
}

// Long enough that a thread runs several items of a head together, which see different blocks.
TEST(items_side_by_side) {
  set_num_threads(1);
  for (bool causal : {false, true}) {
    check_levels<float>({2, 1, 24, {205}, {650}, causal, 0, 0.0f}, {Edge::end}, {false, true});
    check_levels<bf16>({2, 1, 24, {205}, {650}, causal, causal ? 90 : 0, 0.0f}, {Edge::end}, {false, true});
  }
  set_num_threads(0);
}

// A NaN key makes NaN of every row that sees it and of no other: a row that sees nothing else, many rows, the last.
TEST(a_key_that_is_no_number) {
  set_num_threads(1);
  struct Rules {
    int64_t nan_key, window;
    float soft_cap;
  };
  for (const Rules& rules : {Rules{0, 0, 0.0f}, Rules{600, 0, 0.0f}, Rules{500, 90, 2.0f}, Rules{650, 90, 2.0f}}) {
    Case c = {2, 1, 24, {1, 130}, {1, 650}, true, rules.window, rules.soft_cap};
    c.nan_key = rules.nan_key;
    check_levels<float>(c, {Edge::end}, {false, true});
    check_levels<bf16>(c, {Edge::end}, {false, true});
  }
  set_num_threads(0);
}

}  // namespace
}  // namespace tilewright::testing
