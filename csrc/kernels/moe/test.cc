// Routing and experts of every level against plain loops in double, at odd sizes, between guard pages.
#include "kernels/moe/moe.h"

#include <cmath>
#include <vector>

#include "base/parallel.h"
#include "kernels/linear/linear.h"
#include "testing/testing.h"

namespace tilewright::testing {
namespace {

struct Size {
  int64_t tokens, experts, k, width, inner;
};

constexpr Size kSizes[] = {
    {1, 1, 1, 1, 1}, {1, 8, 3, 40, 17}, {5, 4, 4, 33, 16}, {37, 3, 2, 64, 33}, {70, 9, 1, 31, 48}};

struct RouteSize {
  int64_t tokens, experts, k;
};

constexpr RouteSize kRouteSizes[] = {{1, 1, 1}, {3, 7, 2}, {5, 16, 16}, {2, 33, 17}, {9, 128, 8}};

double silu(double x) { return x / (1.0 + std::exp(-x)); }

template <class T>
void check_route(int64_t tokens, int64_t experts, int64_t k, Edge edge, bool renormalize) {
  Random random(static_cast<uint64_t>(tokens * experts + k));
  GuardedBuffer<T> logits(tokens * experts, edge);
  GuardedBuffer<int32_t> ids(tokens * k, edge);
  GuardedBuffer<float> weights(tokens * k, edge);
  logits.fill(random, 4.0f);
  RouteArgs args;
  args.logits = rows_of(logits, experts);
  args.num_experts = experts;
  args.num_tokens = tokens;
  args.top_k = k;
  args.renormalize = renormalize;
  args.ids = ids.data();
  args.weights = weights.data();
  route(args);

  std::vector<double> expected;
  for (int64_t t = 0; t < tokens; ++t) {
    auto value = [&](int64_t e) { return double{to_float(logits[t * experts + e])}; };
    std::vector<int64_t> order;
    for (int64_t e = 0; e < experts; ++e) {
      auto place = order.begin();
      while (place != order.end() && value(*place) >= value(e)) ++place;
      order.insert(place, e);
    }
    double total = 0;
    for (int64_t j = 0; j < (renormalize ? k : experts); ++j) total += std::exp(value(order[static_cast<size_t>(j)]));
    for (int64_t j = 0; j < k; ++j) {
      CHECK(ids[t * k + j] == order[static_cast<size_t>(j)]);
      expected.push_back(std::exp(value(order[static_cast<size_t>(j)])) / total);
    }
  }
  check_close(weights.data(), expected.data(), tokens * k, 1e-5, "route");
}

TEST(route) {
  for_each_isa([] {
    for (Edge edge : {Edge::end, Edge::start})
      for (bool renormalize : {false, true})
        for (auto [tokens, experts, k] : kRouteSizes) {
          check_route<float>(tokens, experts, k, edge, renormalize);
          check_route<bf16>(tokens, experts, k, edge, renormalize);
        }
  });
}

// Tokens go to the experts choose(token, j).
template <class TX, class TW, class Choose>
void check_moe(const Size& size, Edge edge, Choose choose) {
  const auto [tokens, experts, k, width, inner] = size;
  Random random(static_cast<uint64_t>(tokens * width + inner));
  GuardedBuffer<TX> x(tokens * width, edge), residual(tokens * width, edge), y(tokens * width, edge);
  GuardedBuffer<TW> gate_up(experts * 2 * inner * width, edge), down(experts * width * inner, edge);
  const WeightLayout layout = layout_of(kFormatOf<TW>);
  PackedWeight gate_up_form = {.format = kFormatOf<TW>, .layout = layout, .n = 2 * inner, .k = width, .gated = true};
  PackedWeight down_form = {.format = kFormatOf<TW>, .layout = layout, .n = width, .k = inner};
  GuardedBuffer<TW> packed_gate_up(experts * gate_up_form.elements(), edge);
  GuardedBuffer<TW> packed_down(experts * down_form.elements(), edge);
  GuardedBuffer<int32_t> ids(tokens * k, edge);
  GuardedBuffer<float> weights(tokens * k, edge);
  x.fill(random);
  residual.fill(random);
  gate_up.fill(random, 0.3f);
  down.fill(random, 0.3f);
  weights.fill(random);
  for (int64_t i = 0; i < tokens * k; ++i) ids[i] = static_cast<int32_t>(choose(i / k, i % k));
  for (int64_t e = 0; e < experts; ++e) {
    gate_up_form.data = packed_gate_up.data() + e * gate_up_form.elements();
    pack_weight({rows_of(gate_up, width).from(e * 2 * inner), gate_up_form});
    down_form.data = packed_down.data() + e * down_form.elements();
    pack_weight({rows_of(down, inner).from(e * width), down_form});
  }
  gate_up_form.data = packed_gate_up.data();
  down_form.data = packed_down.data();

  std::vector<double> expected, between(static_cast<size_t>(inner));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < width; ++i) expected.push_back(to_float(residual[t * width + i]));
    for (int64_t j = 0; j < k; ++j) {
      const int64_t e = ids[t * k + j];
      auto product = [&](int64_t row) {
        double sum = 0;
        for (int64_t i = 0; i < width; ++i)
          sum += double{to_float(x[t * width + i])} * to_float(gate_up[(e * 2 * inner + row) * width + i]);
        return sum;
      };
      for (int64_t r = 0; r < inner; ++r) between[static_cast<size_t>(r)] = silu(product(r)) * product(inner + r);
      for (int64_t i = 0; i < width; ++i) {
        double sum = 0;
        for (int64_t r = 0; r < inner; ++r)
          sum += between[static_cast<size_t>(r)] * to_float(down[(e * width + i) * inner + r]);
        expected[static_cast<size_t>(t * width + i)] += weights[t * k + j] * sum;
      }
    }
  }

  MoeArgs args;
  args.x = rows_of(x, width);
  args.residual = rows_of(residual, width);
  args.y = rows_of(y, width);
  args.ids = ids.data();
  args.weights = weights.data();
  args.gate_up = gate_up_form;
  args.down = down_form;
  args.num_tokens = tokens;
  args.num_experts = experts;
  args.top_k = k;
  moe(args);
  // bf16: act(gate) * up is rounded between the products, 2^-9 of each of the terms that are summed.
  check_close(y.data(), expected.data(), tokens * width, kIsBf16<TX> ? 1e-2 : 1e-4,
              "moe of " + std::to_string(tokens) + " tokens, " + std::to_string(width) + " x " + std::to_string(inner));
}

TEST(moe) {
  for_each_isa([] {
    for (const Size& size : kSizes)
      for (Edge edge : {Edge::end, Edge::start}) {
        auto spread = [&](int64_t token, int64_t j) { return (token * 5 + j) % size.experts; };
        check_moe<float, float>(size, edge, spread);
        check_moe<float, bf16>(size, edge, spread);
        check_moe<bf16, bf16>(size, edge, spread);
        check_moe<bf16, bf16>(size, edge, [&](int64_t, int64_t) { return size.experts - 1; });
      }
  });
}

TEST(moe_on_many_threads) {
  set_num_threads(7);
  const Size size = {37, 9, 3, 70, 33};
  auto spread = [&](int64_t token, int64_t j) { return (token * 5 + j) % size.experts; };
  check_moe<bf16, bf16>(size, Edge::end, spread);
  check_moe<float, float>(size, Edge::end, spread);
  set_num_threads(0);
}

TEST(moe_of_no_tokens_touches_nothing) {
  MoeArgs args;
  args.num_experts = args.top_k = 1;
  args.gate_up = {.n = 2, .k = 1, .gated = true};
  args.down = {.n = 1, .k = 1};
  moe(args);
}

}  // namespace
}  // namespace tilewright::testing
