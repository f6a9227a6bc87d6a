// GroupNorm of every level against plain loops in double, at odd sizes, between guard pages.
#include "kernels/group_norm/group_norm.h"

#include <cmath>
#include <vector>

#include "testing/testing.h"

namespace tilewright::testing {
namespace {

struct Size {
  int64_t pixels, channels, groups;
};

// The last two have more pixels than a chunk.
constexpr Size kSizes[] = {{1, 4, 2}, {5, 6, 3}, {9, 35, 5}, {7, 96, 32}, {4, 33, 1}, {530, 130, 2}, {9000, 7, 7}};

double silu(double x) { return x / (1.0 + std::exp(-x)); }

template <class T, class W>
void check_group_norm(Size size, Edge edge) {
  constexpr int64_t kBatch = 2;
  constexpr float kEps = 1e-5f;
  const auto [pixels, channels, groups] = size;
  const int64_t count = kBatch * pixels * channels, width = channels / groups;
  Random random(static_cast<uint64_t>(count));
  GuardedBuffer<T> x(count, edge), y(count, edge);
  GuardedBuffer<W> weight(channels, edge), bias(channels, edge);
  x.fill(random, 1.0f, 2.0f);
  weight.fill(random);
  bias.fill(random);
  std::vector<double> expected(static_cast<size_t>(count));
  for (int64_t item = 0; item < kBatch; ++item)
    for (int64_t group = 0; group < groups; ++group) {
      const auto each = [&](auto fn) {
        for (int64_t p = 0; p < pixels; ++p)
          for (int64_t c = group * width; c < (group + 1) * width; ++c) fn((item * pixels + p) * channels + c, c);
      };
      double mean = 0, squares = 0;
      each([&](int64_t i, int64_t) { mean += to_float(x[i]) / static_cast<double>(pixels * width); });
      each([&](int64_t i, int64_t) { squares += (to_float(x[i]) - mean) * (to_float(x[i]) - mean); });
      const double scale = 1.0 / std::sqrt(squares / static_cast<double>(pixels * width) + kEps);
      each([&](int64_t i, int64_t c) {
        expected[static_cast<size_t>(i)] =
            silu((to_float(x[i]) - mean) * scale * to_float(weight[c]) + to_float(bias[c]));
      });
    }

  GroupNormArgs args;
  args.x = rows_of(x, channels);
  args.y = rows_of(y, channels);
  args.weight = weight.data();
  args.bias = bias.data();
  args.weight_dtype = dtype_of<W>();
  args.batch = kBatch;
  args.pixels = pixels;
  args.channels = channels;
  args.groups = groups;
  args.eps = kEps;
  args.activation = Activation::silu;
  group_norm(args);
  check_close(y.data(), expected.data(), count, 5e-5, "group_norm of " + std::to_string(channels) + " channels");
}

TEST(group_norm_matches_plain_loops) {
  for_each_isa([] {
    for (const Size& size : kSizes)
      for (Edge edge : {Edge::end, Edge::start}) {
        check_group_norm<float, float>(size, edge);
        check_group_norm<float, bf16>(size, edge);
        check_group_norm<bf16, float>(size, edge);
        check_group_norm<bf16, bf16>(size, edge);
      }
  });
}

}  // namespace
}  // namespace tilewright::testing
