// The split of packed projections and the gates against plain loops, at odd sizes, between guard pages.
#include <cmath>
#include <string>
#include <vector>

#include "kernels/delta_inputs/delta_inputs.h"
#include "testing/testing.h"

namespace tilewright::testing {
namespace {

template <class T, class P>
void check_gates(int64_t heads, Edge edge) {
  constexpr int64_t kTokens = 5;
  GuardedBuffer<T> a(kTokens * heads, edge), b(kTokens * heads, edge);
  GuardedBuffer<P> a_log(heads, edge), dt_bias(heads, edge);
  GuardedBuffer<float> g(kTokens * heads, edge), beta(kTokens * heads, edge);
  Random random(static_cast<uint64_t>(heads));
  a.fill(random, 8.0f);
  b.fill(random, 8.0f);
  a_log.fill(random, 2.0f);
  dt_bias.fill(random, 4.0f);
  std::vector<double> expected_g, expected_beta;
  for (int64_t i = 0; i < kTokens * heads; ++i) {
    const double step = to_float(a[i]) + to_float(dt_bias[i % heads]);
    expected_g.push_back(-std::exp(to_float(a_log[i % heads])) * std::log1p(std::exp(step)));
    expected_beta.push_back(1.0 / (1.0 + std::exp(-to_float(b[i]))));
  }
  GatesArgs args = {};
  args.a = rows_of(a, heads);
  args.b = rows_of(b, heads);
  args.a_log = a_log.data();
  args.dt_bias = dt_bias.data();
  args.a_log_dtype = args.dt_bias_dtype = dtype_of<P>();
  args.g = rows_of(g, heads);
  args.beta = rows_of(beta, heads);
  args.num_tokens = kTokens;
  args.num_heads = heads;
  delta_gates(args);
  check_close(g.data(), expected_g.data(), g.size(), 2e-6, "g, " + std::to_string(heads) + " heads");
  check_close(beta.data(), expected_beta.data(), beta.size(), 1e-6, "beta, " + std::to_string(heads) + " heads");
}

TEST(delta_gates_match_plain_loops) {
  for_each_isa([] {
    for (Edge edge : {Edge::end, Edge::start})
      for (int64_t heads = 1; heads <= 35; ++heads) {
        check_gates<float, float>(heads, edge);
        check_gates<bf16, float>(heads, edge);
        check_gates<float, bf16>(heads, edge);
        check_gates<bf16, bf16>(heads, edge);
      }
  });
}

// Every element names the place it comes from.
TEST(split_projections_puts_every_element_in_its_place) {
  for (Edge edge : {Edge::end, Edge::start})
    for (bool interleaved : {false, true})
      for (int64_t key_heads : {1, 3})
        for (int64_t group : {1, 2}) {
          constexpr int64_t kTokens = 3, kKeys = 5, kValues = 3;
          const int64_t heads = key_heads * group, keys = key_heads * kKeys, values = heads * kValues;
          GuardedBuffer<float> qkvz(kTokens * 2 * (keys + values), edge), ba(kTokens * 2 * heads, edge);
          GuardedBuffer<float> qkv(kTokens * (2 * keys + values), edge), z(kTokens * values, edge);
          GuardedBuffer<float> b(kTokens * heads, edge), a(kTokens * heads, edge);
          for (int64_t i = 0; i < qkvz.size(); ++i) qkvz[i] = static_cast<float>(i);
          for (int64_t i = 0; i < ba.size(); ++i) ba[i] = static_cast<float>(i);
          split_projections({rows_of(qkvz, 2 * (keys + values)), rows_of(ba, 2 * heads),
                             rows_of(qkv, 2 * keys + values), rows_of(z, values), rows_of(b, heads), rows_of(a, heads),
                             kTokens, key_heads, heads, kKeys, kValues, interleaved});
          for (int64_t t = 0; t < kTokens; ++t) {
            const float row = static_cast<float>(t * 2 * (keys + values)), gates = static_cast<float>(t * 2 * heads);
            for (int64_t h = 0; h < heads; ++h) {
              const int64_t key_head = h / group, begin = key_head * 2 * (kKeys + group * kValues);
              const int64_t v_begin = interleaved ? begin + 2 * kKeys + h % group * kValues : 2 * keys + h * kValues;
              const int64_t z_begin = v_begin + (interleaved ? group * kValues : values);
              for (int64_t i = 0; i < kValues; ++i) {
                CHECK(qkv[t * (2 * keys + values) + 2 * keys + h * kValues + i] == row + v_begin + i);
                CHECK(z[t * values + h * kValues + i] == row + z_begin + i);
              }
              for (int64_t i = 0; i < kKeys; ++i) {
                const int64_t q_begin = interleaved ? begin : key_head * kKeys;
                CHECK(qkv[t * (2 * keys + values) + key_head * kKeys + i] == row + q_begin + i);
                CHECK(qkv[t * (2 * keys + values) + keys + key_head * kKeys + i] ==
                      row + q_begin + (interleaved ? kKeys : keys) + i);
              }
              const int64_t b_place = interleaved ? key_head * 2 * group + h % group : h;
              CHECK(b[t * heads + h] == gates + b_place);
              CHECK(a[t * heads + h] == gates + b_place + (interleaved ? group : heads));
            }
          }
        }
}

}  // namespace
}  // namespace tilewright::testing
