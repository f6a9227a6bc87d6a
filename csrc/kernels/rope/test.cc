// Every rope kernel of this machine against plain loops in double, at odd widths, between guard pages.
#include <cmath>
#include <vector>

#include "kernels/rope/rope.h"
#include "testing/testing.h"

namespace tilewright::testing {
namespace {

constexpr int64_t kTokens = 3, kHeads = 2;
constexpr float kEps = 1e-6f;

struct Form {
  bool interleaved, normed, in_place;
};

template <class T>
std::vector<double> rotated(const T* x, const float* cos_row, const float* sin_row, int64_t width, int64_t half,
                            const float* weight, bool interleaved) {
  std::vector<double> head;
  double squares = 0;
  for (int64_t i = 0; i < width; ++i) {
    head.push_back(to_float(x[i]));
    squares += head.back() * head.back();
  }
  if (weight)
    for (int64_t i = 0; i < width; ++i) head[i] *= weight[i] / std::sqrt(squares / static_cast<double>(width) + kEps);
  for (int64_t j = 0; j < half; ++j) {
    double& a = head[interleaved ? 2 * j : j];
    double& b = head[interleaved ? 2 * j + 1 : j + half];
    const double c = cos_row[j], s = sin_row[j], first = a;
    a = first * c - b * s;
    b = b * c + first * s;
  }
  return head;
}

// Heads with a gap of one after each; the last head ends the buffer.
template <class T>
void check_rope(int64_t width, int64_t half, Edge edge, Form form) {
  Random random(static_cast<uint64_t>(width));
  const int64_t head_stride = width + 1, token_stride = kHeads * head_stride;
  GuardedBuffer<T> x(kTokens * token_stride - 1, edge), y(kTokens * token_stride - 1, edge);
  GuardedBuffer<float> cos(kTokens * half, edge), sin(kTokens * half, edge), weight(width, edge);
  for (GuardedBuffer<float>* buffer : {&cos, &sin, &weight}) buffer->fill(random);
  x.fill(random);
  std::vector<std::vector<double>> expected;
  for (int64_t i = 0; i < kTokens * kHeads; ++i)
    expected.push_back(rotated(&x[i * head_stride], &cos[i / kHeads * half], &sin[i / kHeads * half], width, half,
                               form.normed ? weight.data() : nullptr, form.interleaved));

  RopeArgs args;
  T* target = form.in_place ? x.data() : y.data();
  args.parts[0] = {heads_of(x, token_stride, head_stride), heads_of(form.in_place ? x : y, token_stride, head_stride),
                   kHeads, form.normed ? weight.data() : nullptr};
  args.cos = cos.data();
  args.sin = sin.data();
  args.table_stride = half;
  args.num_tokens = kTokens;
  args.head_width = width;
  args.num_frequencies = half;
  args.interleaved = form.interleaved;
  args.eps = kEps;
  rope(args);
  for (int64_t i = 0; i < kTokens * kHeads; ++i) {
    check_close(target + i * head_stride, expected[i].data(), width, 1e-5,
                "rope, width " + std::to_string(width) + ", half " + std::to_string(half));
    if (i && !form.in_place) CHECK(std::isnan(to_float(target[i * head_stride - 1])));  // the gap is still poison
  }
}

TEST(rope_matches_plain_loops) {
  for_each_isa([] {
    for (Edge edge : {Edge::end, Edge::start})
      for (int64_t half = 1; half <= 37; ++half)
        for (int64_t rest : {0, 1, 19})
          for (int form = 0; form < 8; ++form) {
            check_rope<float>(2 * half + rest, half, edge, {bool(form & 1), bool(form & 2), bool(form & 4)});
            check_rope<bf16>(2 * half + rest, half, edge, {bool(form & 1), bool(form & 2), bool(form & 4)});
          }
  });
}

TEST(rope_table_matches_libm) {
  for_each_isa([] {
    for (Edge edge : {Edge::end, Edge::start})
      for (int64_t half = 1; half <= 35; ++half) {
        GuardedBuffer<int64_t> positions(2 * kTokens, edge);
        GuardedBuffer<float> inv_freq(half, edge), cos(kTokens * half, edge), sin(kTokens * half, edge);
        GuardedBuffer<int32_t> axes(half, edge);
        for (int64_t i = 0; i < 2 * kTokens; ++i) positions[i] = i * 52'429;  // up to 262,145
        for (int64_t j = 0; j < half; ++j) {
          inv_freq[j] = static_cast<float>(std::pow(1e4, -static_cast<double>(j) / static_cast<double>(half)));
          axes[j] = static_cast<int32_t>(j % 2);
        }
        RopeTableArgs args;
        args.positions = positions.data();
        args.axis_stride = kTokens;
        args.position_dtype = DType::i64;
        args.inv_freq = inv_freq.data();
        args.axis_of_frequency = axes.data();
        args.cos = cos.data();
        args.sin = sin.data();
        args.num_tokens = kTokens;
        args.num_frequencies = half;
        rope_table(args);
        for (int64_t token = 0; token < kTokens; ++token)
          for (int64_t j = 0; j < half; ++j) {
            const float angle = static_cast<float>(positions[axes[j] * kTokens + token]) * inv_freq[j];
            CHECK(std::abs(cos[token * half + j] - std::cos(double{angle})) < 1.2e-7);
            CHECK(std::abs(sin[token * half + j] - std::sin(double{angle})) < 1.2e-7);
          }
      }
  });
}

}  // namespace
}  // namespace tilewright::testing
