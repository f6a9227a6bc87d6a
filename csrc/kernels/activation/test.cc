// Every elementwise kernel of this machine against plain loops in double, at odd widths, between guard pages.
#include <cmath>
#include <cstring>
#include <vector>

#include "base/parallel.h"
#include "kernels/activation/activation.h"
#include "testing/testing.h"

namespace tilewright::testing {
namespace {

constexpr int64_t kRows = 3;

double exact(Activation activation, double x) {
  switch (activation) {
    case Activation::none: return x;
    case Activation::silu: return x / (1.0 + std::exp(-x));
    case Activation::gelu_tanh: return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::gelu_erf: return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::gelu_quick: return x / (1.0 + std::exp(-1.702 * x));
  }
  return 0;
}

// Inputs [rows, 2 width] and outputs [rows, width], a gap of one after each row; the last row ends the buffer.
template <class T>
void check_elementwise(int64_t width, Edge edge, Activation activation) {
  Random random(static_cast<uint64_t>(width));
  const int64_t x_stride = 2 * width + 1, y_stride = width + 1;
  GuardedBuffer<T> x(kRows * x_stride - 1, edge), y(kRows * y_stride - 1, edge);
  x.fill(random, 8.0f);
  ElementwiseArgs args;
  args.x = rows_of(x, x_stride);
  args.other = {x.data() + width, x_stride, dtype_of<T>()};
  args.y = rows_of(y, y_stride);
  args.rows = kRows;
  args.width = width;
  args.activation = activation;

  const auto check = [&](const char* what, auto expected_of) {
    for (int64_t row = 0; row < kRows; ++row) {
      std::vector<double> expected;
      for (int64_t i = 0; i < width; ++i)
        expected.push_back(expected_of(to_float(x[row * x_stride + i]), to_float(x[row * x_stride + width + i])));
      // bf16 results come from rough exponentials: 2e-4 before the rounding.
      check_close(&y[row * y_stride], expected.data(), width, kIsBf16<T> ? 2e-4 : 2e-6,
                  std::string(what) + " " + name_of(activation) + ", width " + std::to_string(width));
      if (row) CHECK(std::isnan(to_float(y[row * y_stride - 1])));  // the gap is still poison
    }
    y.poison();
  };
  activate(args);
  check("activate", [&](double a, double) { return exact(activation, a); });
  gate(args);
  check("gate", [&](double a, double b) { return exact(activation, a) * b; });
  add(args);
  check("add", [&](double a, double b) { return a + b; });
}

TEST(elementwise_matches_plain_loops) {
  for_each_isa([] {
    for (Edge edge : {Edge::end, Edge::start})
      for (int i = 0; i < kNumActivations; ++i) {
        for (int64_t width = 1; width <= 35; ++width) {
          check_elementwise<float>(width, edge, static_cast<Activation>(i));
          check_elementwise<bf16>(width, edge, static_cast<Activation>(i));
        }
        for (int64_t width : {127, 8191, 8192, 8193, 16400})
          check_elementwise<bf16>(width, edge, static_cast<Activation>(i));
      }
  });
}

// Outputs too large for the caches are written past them (base/stream.h): the same bits as 64 rows at a time. With odd
// widths most rows lack the alignment that such stores need.
template <class T>
void check_streamed(int64_t width, void (*op)(const ElementwiseArgs&)) {
  const int64_t rows = (num_threads() * kCoreCacheBytes) / (width * static_cast<int64_t>(sizeof(T))) + 2;
  constexpr int64_t kPart = 64;
  Random random(static_cast<uint64_t>(width));
  const int64_t stride = 2 * width;  // gates read what lies behind a row
  GuardedBuffer<T> x(rows * stride), other(rows * width), y(rows * width), part(kPart * width);
  x.fill(random, 8.0f);
  other.fill(random);
  ElementwiseArgs args;
  args.x = rows_of(x, stride);
  args.other = rows_of(other, width);
  args.y = rows_of(y, width);
  args.rows = rows;
  args.width = width;
  args.activation = Activation::silu;
  op(args);
  args.y = rows_of(part, width);
  for (int64_t row = 0; row < rows; row += kPart) {
    args.rows = row + kPart < rows ? kPart : rows - row;
    args.x.data = x.data() + row * stride;
    args.other.data = other.data() + row * width;
    op(args);
    const size_t size_bytes = static_cast<size_t>(args.rows * width) * sizeof(T);
    CHECK(std::memcmp(part.data(), y.data() + row * width, size_bytes) == 0);
  }
}

TEST(large_outputs_have_the_bits_of_small_ones) {
  set_num_threads(2);
  for_each_isa([] {
    for (auto op : {activate, gate, add}) check_streamed<bf16>(2049, op);
    check_streamed<float>(2048, gate);
  });
  set_num_threads(0);
}

// Two heads a token, with a gap after each token; the gates lie between the heads of a wider row.
template <class T, class G>
void check_sigmoid_gate(int64_t width, Edge edge, bool one_per_row) {
  Random random(static_cast<uint64_t>(width));
  constexpr int64_t kInner = 2;
  const int64_t gate_width = one_per_row ? 1 : width;
  const int64_t stride = kInner * width + 1, gate_stride = 2 * kInner * gate_width;
  GuardedBuffer<T> x(kRows * stride - 1, edge), y(kRows * stride - 1, edge);
  GuardedBuffer<G> gate(kRows * gate_stride - gate_width, edge);
  x.fill(random, 4.0f);
  gate.fill(random, 8.0f);
  SigmoidGateArgs args;
  args.x = heads_of(x, stride, width);
  args.y = heads_of(y, stride, width);
  args.gate = heads_of(gate, gate_stride, 2 * gate_width);
  args.outer = kRows;
  args.inner = kInner;
  args.width = width;
  args.one_per_row = one_per_row;
  sigmoid_gate(args);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t head = 0; head < kInner; ++head) {
      std::vector<double> expected;
      for (int64_t i = 0; i < width; ++i) {
        const double g = to_float(gate[row * gate_stride + head * 2 * gate_width + (one_per_row ? 0 : i)]);
        expected.push_back(to_float(x[row * stride + head * width + i]) / (1.0 + std::exp(-g)));
      }
      check_close(&y[row * stride + head * width], expected.data(), width, kIsBf16<T> ? 2e-4 : 2e-6,
                  "sigmoid_gate, width " + std::to_string(width));
    }
    if (row) CHECK(std::isnan(to_float(y[row * stride - 1])));
  }
}

TEST(sigmoid_gate_matches_plain_loops) {
  for_each_isa([] {
    for (Edge edge : {Edge::end, Edge::start})
      for (bool one_per_row : {false, true})
        for (int64_t width : {1, 3, 7, 8, 15, 16, 17, 31, 33, 127, 256}) {
          check_sigmoid_gate<float, float>(width, edge, one_per_row);
          check_sigmoid_gate<bf16, float>(width, edge, one_per_row);
          check_sigmoid_gate<bf16, bf16>(width, edge, one_per_row);
          check_sigmoid_gate<float, bf16>(width, edge, one_per_row);
        }
  });
}

// Two streams whose rows lie side by side, with rows between the streams and a gap after each that are not written.
template <class T>
void check_snake(int64_t width, Edge edge) {
  Random random(static_cast<uint64_t>(width));
  constexpr int64_t kOuter = 2, kInner = 3, kBefore = 2;
  const int64_t stride = width + 1, x_item = kInner * stride, y_item = (kBefore + kInner) * stride;
  GuardedBuffer<T> x(kOuter * x_item - 1, edge), y(kOuter * y_item - 1, edge);
  GuardedBuffer<float> scale(width, edge), share(width, edge);
  x.fill(random, 30.0f);
  scale.fill(random, 4.0f);
  share.fill(random, 2.0f);
  SnakeArgs args;
  args.x = heads_of(x, x_item, stride);
  args.y = heads_of(y, y_item, stride);
  args.y.data = y.data() + kBefore * stride;
  args.scale = scale.data();
  args.share = share.data();
  args.outer = kOuter;
  args.inner = kInner;
  args.width = width;
  snake(args);
  for (int64_t item = 0; item < kOuter; ++item) {
    for (int64_t i = 0; i < kBefore * stride; ++i) CHECK(std::isnan(to_float(y[item * y_item + i])));
    for (int64_t row = 0; row < kInner; ++row) {
      T* got = &y[item * y_item + (kBefore + row) * stride];
      std::vector<double> expected;
      for (int64_t i = 0; i < width; ++i) {
        const float value = to_float(x[item * x_item + row * stride + i]);
        // The angle as rounded to fp32: an error of 2^-24 of a hundred is large for a wave.
        const double wave = std::sin(static_cast<double>(value * scale[i]));
        expected.push_back(value + wave * wave * share[i]);
      }
      check_close(got, expected.data(), width, 2e-6, "snake, width " + std::to_string(width));
      if (row) CHECK(std::isnan(to_float(got[-1])));
    }
  }
}

TEST(snake_matches_plain_loops) {
  for_each_isa([] {
    for (Edge edge : {Edge::end, Edge::start})
      for (int64_t width : {1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 96, 127, 200}) {
        check_snake<float>(width, edge);
        check_snake<bf16>(width, edge);
      }
  });
}

}  // namespace
}  // namespace tilewright::testing
