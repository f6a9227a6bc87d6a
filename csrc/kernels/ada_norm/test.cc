// Adaptive norms of every level against plain loops in double, at odd widths, between guard pages.
#include "kernels/ada_norm/ada_norm.h"

#include <cmath>
#include <vector>

#include "testing/testing.h"

namespace tilewright::testing {
namespace {

constexpr int64_t kTokens = 6;
constexpr float kEps = 1e-5f, kConstant = 0.75f;

template <class T, class M>
void check_ada_norm(int64_t width, int64_t share, Edge edge, bool is_rms) {
  Random random(static_cast<uint64_t>(width));
  GuardedBuffer<T> x(kTokens * width, edge), residual(kTokens * width, edge), y(kTokens * width, edge);
  GuardedBuffer<M> scale(kTokens / share * width, edge), shift(kTokens / share * width, edge),
      gate(kTokens / share * width, edge), weight(width, edge), bias(width, edge);
  x.fill(random);
  residual.fill(random);
  for (GuardedBuffer<M>* buffer : {&scale, &shift, &gate, &weight, &bias}) buffer->fill(random);

  std::vector<double> total, expected;
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto of = [&](const GuardedBuffer<M>& rows, int64_t i) { return to_float(rows[t / share * width + i]); };
    std::vector<double> row;
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < width; ++i) {
      T sum;
      assign(sum, std::fma(of(gate, i), to_float(x[t * width + i]), to_float(residual[t * width + i])));
      row.push_back(to_float(sum));
      if (!is_rms) mean += row.back() / static_cast<double>(width);
    }
    for (double value : row) squares += (value - mean) * (value - mean);
    const double factor = 1.0 / std::sqrt(squares / static_cast<double>(width) + kEps);
    for (int64_t i = 0; i < width; ++i) {
      const double normed = (row[static_cast<size_t>(i)] - mean) * factor * to_float(weight[i]) + to_float(bias[i]);
      expected.push_back(normed * (kConstant + of(scale, i)) + of(shift, i));
    }
    total.insert(total.end(), row.begin(), row.end());
  }

  AdaNormArgs args;
  args.x = rows_of(x, width);
  args.residual = rows_of(residual, width);
  args.y = rows_of(y, width);
  args.scale = {rows_of(scale, width), share};
  args.shift = {rows_of(shift, width), share};
  args.gate = {rows_of(gate, width), share};
  args.weight = rows_of(weight, width);
  args.bias = rows_of(bias, width);
  args.num_rows = kTokens;
  args.width = width;
  args.eps = kEps;
  args.constant = kConstant;
  args.is_rms = is_rms;
  const std::string label = ", width " + std::to_string(width);
  gated_add(args);
  check_close(y.data(), total.data(), kTokens * width, 1e-6, "gated_add" + label);
  y.poison();
  ada_norm(args);
  check_close(residual.data(), total.data(), kTokens * width, 1e-6, "the residual" + label);
  check_close(y.data(), expected.data(), kTokens * width, 2e-4, "ada_norm" + label);
}

TEST(ada_norm_matches_plain_loops) {
  for_each_isa([] {
    for (Edge edge : {Edge::end, Edge::start})
      for (int64_t width : {1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 130})
        for (int64_t share : {1, 2, 6})
          for (bool is_rms : {false, true}) {
            check_ada_norm<float, float>(width, share, edge, is_rms);
            check_ada_norm<float, bf16>(width, share, edge, is_rms);
            check_ada_norm<bf16, float>(width, share, edge, is_rms);
            check_ada_norm<bf16, bf16>(width, share, edge, is_rms);
          }
  });
}

}  // namespace
}  // namespace tilewright::testing
