// Packed linear of every level against plain loops in double, at odd sizes, between guard pages.
#include "kernels/linear/linear.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "testing/testing.h"

namespace tilewright::testing {
namespace {

struct Size {
  int64_t m, n, k;
};

constexpr Size kSizes[] = {{1, 2, 1},    {1, 34, 33},   {3, 66, 31},  {16, 32, 64},
                           {17, 30, 95}, {33, 100, 40}, {70, 48, 257}};

double silu(double x) { return x / (1.0 + std::exp(-x)); }

template <class TX, class TW, class TY>
void check_linear(Size size, Edge edge, bool gated) {
  const auto [m, n, k] = size;
  const int64_t columns = gated ? n / 2 : n;
  PackedWeight form = {.format = kFormatOf<TW>, .n = n, .k = k, .gated = gated};
  Random random(static_cast<uint64_t>(m * n + k));
  GuardedBuffer<TX> x(m * k, edge);
  GuardedBuffer<TW> weight(n * k, edge), packed(form.elements(), edge);
  GuardedBuffer<float> bias(form.num_strips() * kStripColumns, edge);
  GuardedBuffer<TY> residual(m * columns, edge), y(m * columns, edge);
  x.fill(random);
  weight.fill(random);
  bias.fill(random);
  residual.fill(random);
  form.data = packed.data();
  pack_weight({rows_of(weight, k), form});

  // Column c of a strip and the row of W it holds: plain strips are 32 rows, gated ones 16 of gate and 16 of up.
  auto sum = [&](int64_t row, int64_t out, bool up) {
    const int64_t strip = out / (gated ? kTileColumns : kStripColumns),
                  within = out % (gated ? kTileColumns : kStripColumns);
    double total = bias[strip * kStripColumns + (up ? kTileColumns : 0) + within];
    for (int64_t i = 0; i < k; ++i)
      total += double{to_float(x[row * k + i])} * to_float(weight[(out + (up ? n / 2 : 0)) * k + i]);
    return total;
  };
  std::vector<double> expected;
  for (int64_t row = 0; row < m; ++row)
    for (int64_t out = 0; out < columns; ++out)
      expected.push_back((gated ? silu(sum(row, out, false)) * sum(row, out, true) : silu(sum(row, out, false))) +
                         to_float(residual[row * columns + out]));

  LinearArgs args = {};
  args.x = rows_of(x, k);
  args.weight = form;
  args.bias = bias.data();
  args.residual = rows_of(residual, columns);
  args.y = rows_of(y, columns);
  args.m = m;
  args.activation = Activation::silu;
  linear(args);
  check_close(y.data(), expected.data(), m * columns, 1e-4,
              "linear " + std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k));
}

TEST(linear) {
  for_each_isa([] {
    for (const Size& size : kSizes)
      for (Edge edge : {Edge::end, Edge::start})
        for (bool gated : {false, true}) {
          check_linear<float, float, float>(size, edge, gated);
          check_linear<float, bf16, float>(size, edge, gated);
          check_linear<bf16, float, bf16>(size, edge, gated);
          check_linear<bf16, bf16, bf16>(size, edge, gated);
          check_linear<bf16, bf16, float>(size, edge, gated);
        }
  });
}

// A row of 70 has the same bits as the row alone, and as in any smaller batch: other kernels may multiply those.
template <class T>
void check_rows_alone() {
  constexpr int64_t m = 70, n = 40, k = 203;
  Random random(3);
  PackedWeight form = {.format = kFormatOf<T>, .n = n, .k = k};
  GuardedBuffer<T> x(m * k), weight(n * k), packed(form.elements());
  GuardedBuffer<float> together(m * n), alone(m * n);
  x.fill(random);
  weight.fill(random);
  form.data = packed.data();
  pack_weight({rows_of(weight, k), form});
  LinearArgs args = {};
  args.weight = form;
  const auto multiply = [&](int64_t row, int64_t rows, const GuardedBuffer<float>& y) {
    args.x = rows_of(x, k).from(row);
    args.y = rows_of(y, n).from(row);
    args.m = rows;
    linear(args);
  };
  multiply(0, m, together);
  for (int64_t batch : {1, 2, 3, 4, 5, 8, 13, 33}) {
    alone.poison();
    for (int64_t row = 0; row < m; row += batch) multiply(row, std::min(batch, m - row), alone);
    CHECK(std::memcmp(together.data(), alone.data(), m * n * sizeof(float)) == 0);
  }
}

TEST(a_row_does_not_depend_on_the_rows_beside_it) {
  for_each_isa([] {
    check_rows_alone<float>();
    check_rows_alone<bf16>();
  });
}

TEST(unpack_gives_back_the_weight) {
  Random random(1);
  GuardedBuffer<bf16> weight(70 * 33), back(70 * 33), packed(3 * 2 * 2 * kTileElements);
  const PackedWeight form = {.data = packed.data(), .format = WeightFormat::bf16, .n = 70, .k = 33};
  CHECK(form.elements() == packed.size());
  weight.fill(random);
  pack_weight({rows_of(weight, 33), form});
  unpack_weight({rows_of(back, 33), form});
  CHECK(std::memcmp(weight.data(), back.data(), 70 * 33 * 2) == 0);
}

}  // namespace
}  // namespace tilewright::testing
