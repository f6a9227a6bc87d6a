// Every norm kernel of this machine against plain loops in double, at odd widths, between guard pages.
#include <cmath>
#include <cstring>
#include <vector>

#include "base/parallel.h"
#include "kernels/norm/norm.h"
#include "testing/testing.h"

namespace tilewright::testing {
namespace {

constexpr int64_t kOuter = 3, kInner = 2;
constexpr float kEps = 1e-6f;

// Rows of `width` with a gap after each, which exposes a kernel that ignores a stride or runs past a row. The last row
// ends the buffer.
template <class T>
struct GappedRows {
  GappedRows(int64_t width, Edge edge) : width(width), buffer(kOuter * kInner * (width + 1) - 1, edge) {}
  operator Heads() const { return heads_of(buffer, kInner * (width + 1), width + 1); }
  T* row(int64_t i) const { return buffer.data() + i * (width + 1); }
  int64_t width;
  GuardedBuffer<T> buffer;
};

template <class T>
double silu(T gate) {
  const double x = to_float(gate);
  return x / (1.0 + std::exp(-x));
}

struct Form {
  bool residual, gate, weight_plus_one;
};

template <class T, class W>
void check_rms_norm(int64_t width, Edge edge, Form form) {
  Random random(static_cast<uint64_t>(width));
  GappedRows<T> x(width, edge), y(width, edge), residual(width, edge), gate(width, edge);
  GuardedBuffer<W> weight(width, edge);
  x.buffer.fill(random);
  residual.buffer.fill(random);
  gate.buffer.fill(random, 3.0f);
  weight.fill(random);

  std::vector<std::vector<double>> expected(kOuter * kInner);
  std::vector<std::vector<double>> new_residual(kOuter * kInner);
  for (int64_t r = 0; r < kOuter * kInner; ++r) {
    std::vector<double> row;
    double squares = 0;
    for (int64_t i = 0; i < width; ++i) {
      T sum;
      assign(sum, to_float(x.row(r)[i]) + (form.residual ? to_float(residual.row(r)[i]) : 0.0f));
      row.push_back(to_float(sum));
      squares += row.back() * row.back();
    }
    new_residual[r] = row;
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(width) + kEps);
    for (int64_t i = 0; i < width; ++i) {
      row[i] *= scale * (to_float(weight[i]) + (form.weight_plus_one ? 1.0 : 0.0));
      if (form.gate) row[i] *= silu(gate.row(r)[i]);
    }
    expected[r] = row;
  }

  NormArgs args;
  args.x = x;
  args.y = y;
  if (form.residual) args.residual = residual;
  if (form.gate) args.gate = gate;
  args.weight = weight.data();
  args.outer = kOuter;
  args.inner = kInner;
  args.width = width;
  args.eps = kEps;
  args.weight_plus_one = form.weight_plus_one;
  args.weight_dtype = dtype_of<W>();
  rms_norm(args);

  const std::string label = "rms_norm, width " + std::to_string(width);
  for (int64_t r = 0; r < kOuter * kInner; ++r) {
    check_close(y.row(r), expected[r].data(), width, 1e-5, label);
    if (form.residual) check_close(residual.row(r), new_residual[r].data(), width, 1e-6, label + ", residual");
    if (r) CHECK(std::isnan(to_float(y.row(r)[-1])));  // the gap is still poison
  }
}

template <class T, class W>
void check_layer_norm(int64_t width, Edge edge, bool with_bias) {
  Random random(static_cast<uint64_t>(width));
  GappedRows<T> x(width, edge), y(width, edge);
  GuardedBuffer<W> weight(width, edge), bias(width, edge);
  x.buffer.fill(random, 1.0f, 5.0f);  // a mean far from zero shows cancellation in the variance
  weight.fill(random);
  bias.fill(random);

  NormArgs args;
  args.x = x;
  args.y = y;
  args.weight = weight.data();
  if (with_bias) args.bias = bias.data();
  args.outer = kOuter;
  args.inner = kInner;
  args.width = width;
  args.eps = kEps;
  args.weight_dtype = dtype_of<W>();
  layer_norm(args);

  for (int64_t r = 0; r < kOuter * kInner; ++r) {
    double mean = 0, variance = 0;
    for (int64_t i = 0; i < width; ++i) mean += to_float(x.row(r)[i]) / static_cast<double>(width);
    for (int64_t i = 0; i < width; ++i) variance += std::pow(to_float(x.row(r)[i]) - mean, 2);
    const double scale = 1.0 / std::sqrt(variance / static_cast<double>(width) + kEps);
    std::vector<double> expected;
    for (int64_t i = 0; i < width; ++i)
      expected.push_back((to_float(x.row(r)[i]) - mean) * scale * to_float(weight[i]) +
                         (with_bias ? to_float(bias[i]) : 0.0));
    check_close(y.row(r), expected.data(), width, 5e-5, "layer_norm, width " + std::to_string(width));
  }
}

// Every tail of a 16-lane vector, and widths around whole vectors.
template <class Body>
void for_each_width_and_edge(Body body) {
  for (Edge edge : {Edge::end, Edge::start}) {
    for (int64_t width = 1; width <= 35; ++width) body(width, edge);
    for (int64_t width : {63, 64, 65, 127, 128, 1000, 2049}) body(width, edge);
  }
}

TEST(rms_norm_matches_plain_loops) {
  for_each_isa([] {
    for_each_width_and_edge([](int64_t width, Edge edge) {
      for (Form form : {Form{false, false, false}, Form{true, false, false}, Form{false, true, true}}) {
        check_rms_norm<float, float>(width, edge, form);
        check_rms_norm<float, bf16>(width, edge, form);
        check_rms_norm<bf16, float>(width, edge, form);
        check_rms_norm<bf16, bf16>(width, edge, form);
      }
    });
  });
}

TEST(layer_norm_matches_plain_loops) {
  for_each_isa([] {
    for_each_width_and_edge([](int64_t width, Edge edge) {
      for (bool with_bias : {false, true}) {
        check_layer_norm<float, float>(width, edge, with_bias);
        check_layer_norm<float, bf16>(width, edge, with_bias);
        check_layer_norm<bf16, float>(width, edge, with_bias);
        check_layer_norm<bf16, bf16>(width, edge, with_bias);
      }
    });
  });
}

// Outputs too large for the caches are written past them (base/stream.h): the same bits as 64 rows at a time. With odd
// widths most rows lack the alignment that such stores need.
template <class T>
void check_streamed(int64_t width, void (*norm)(const NormArgs&)) {
  const int64_t rows = (num_threads() * kCoreCacheBytes) / (width * static_cast<int64_t>(sizeof(T))) + 2;
  constexpr int64_t kPart = 64;
  Random random(static_cast<uint64_t>(width));
  GuardedBuffer<T> x(rows * width), y(rows * width), part(kPart * width);
  GuardedBuffer<float> weight(width);
  x.fill(random);
  weight.fill(random);
  NormArgs args;
  args.x = heads_of(x, width, width);
  args.y = heads_of(y, width, width);
  args.weight = weight.data();
  args.outer = rows;
  args.inner = 1;
  args.width = width;
  args.eps = kEps;
  args.weight_dtype = DType::f32;
  norm(args);
  args.y = heads_of(part, width, width);
  for (int64_t row = 0; row < rows; row += kPart) {
    args.outer = row + kPart < rows ? kPart : rows - row;
    args.x.data = x.data() + row * width;
    norm(args);
    const size_t size_bytes = static_cast<size_t>(args.outer * width) * sizeof(T);
    CHECK(std::memcmp(part.data(), y.data() + row * width, size_bytes) == 0);
  }
}

TEST(large_outputs_have_the_bits_of_small_ones) {
  set_num_threads(2);
  for_each_isa([] {
    for (auto norm : {rms_norm, layer_norm}) check_streamed<bf16>(2049, norm);
    check_streamed<float>(2048, rms_norm);
  });
  set_num_threads(0);
}

TEST(norm_of_no_rows_touches_nothing) {
  for_each_isa([] {
    GuardedBuffer<float> empty(0);
    NormArgs args;
    args.x = args.y = heads_of(empty, 0, 0);
    args.weight = empty.data();
    args.width = 8;
    args.weight_dtype = DType::f32;
    rms_norm(args);
    layer_norm(args);
  });
}

}  // namespace
}  // namespace tilewright::testing
