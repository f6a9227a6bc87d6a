// Every kernel of the gated delta rule against plain loops in double, at odd widths, between guard pages.
#include <cmath>
#include <string>
#include <vector>

#include "kernels/gated_delta/gated_delta.h"
#include "testing/testing.h"

namespace tilewright::testing {
namespace {

struct Shape {
  std::vector<int32_t> lengths;
  int64_t key_heads, value_heads, key_width, value_width;
};

constexpr float kEps = 1e-6f;

template <class T>
struct Case {
  Case(const Shape& shape, Edge edge, bool keep_all)
      : shape(shape),
        num_tokens(total(shape.lengths)),
        num_sequences(static_cast<int64_t>(shape.lengths.size())),
        q(num_tokens * shape.key_heads * shape.key_width, edge),
        k(num_tokens * shape.key_heads * shape.key_width, edge),
        v(num_tokens * shape.value_heads * shape.value_width, edge),
        out(v.size(), edge),
        g(num_tokens * shape.value_heads, edge),
        beta(g.size(), edge),
        states((num_sequences + (keep_all ? num_tokens : 0)) * state_size(), edge),
        starts(num_sequences + 1, edge),
        read_slots(num_sequences, edge),
        write_slots(keep_all ? num_tokens : 0, edge) {
    Random random(static_cast<uint64_t>(num_tokens * 31 + shape.value_width));
    q.fill(random);
    k.fill(random);
    v.fill(random);
    g.fill(random, 0.5f, -0.5f);
    beta.fill(random, 0.5f, 0.5f);
    states.fill(random, 0.3f);
    starts[0] = 0;
    for (int64_t b = 0; b < num_sequences; ++b) {
      starts[b + 1] = starts[b] + shape.lengths[b];
      read_slots[b] = b ? static_cast<int32_t>(num_sequences - 1 - b) : -1;  // the first begins with nothing
    }
    for (int64_t t = 0; t < write_slots.size(); ++t)
      write_slots[t] = t % 3 == 1 ? -1 : static_cast<int32_t>(num_sequences + t);
  }

  static int64_t total(const std::vector<int32_t>& lengths) {
    int64_t sum = 0;
    for (int32_t length : lengths) sum += length;
    return sum;
  }
  int64_t state_size() const { return shape.value_heads * shape.key_width * shape.value_width; }

  GatedDeltaArgs args() const {
    GatedDeltaArgs args = {};
    args.q = heads_of(q, shape.key_heads * shape.key_width, shape.key_width);
    args.k = heads_of(k, shape.key_heads * shape.key_width, shape.key_width);
    args.v = heads_of(v, shape.value_heads * shape.value_width, shape.value_width);
    args.out = heads_of(out, shape.value_heads * shape.value_width, shape.value_width);
    args.g = rows_of(g, shape.value_heads);
    args.beta = rows_of(beta, shape.value_heads);
    args.states = states.data();
    args.slot_stride = state_size();
    args.sequences = {starts.data(), read_slots.data(), write_slots.size() ? write_slots.data() : nullptr,
                      num_sequences};
    args.key_heads = shape.key_heads;
    args.value_heads = shape.value_heads;
    args.key_width = shape.key_width;
    args.value_width = shape.value_width;
    args.scale = 0.25f;
    args.eps = kEps;
    args.normalize = true;
    return args;
  }

  // One head of one sequence by the definition; fills `expected` and `expected_states`.
  void run_head(int64_t b, int64_t h, std::vector<double>& expected, std::vector<double>& expected_states) const {
    const int64_t key_head = h / (shape.value_heads / shape.key_heads), keys = shape.key_width;
    const int64_t values = shape.value_width, head_size = keys * values;
    std::vector<double> s(head_size, 0.0), unit_q(keys), unit_k(keys);
    if (read_slots[b] >= 0)
      for (int64_t i = 0; i < head_size; ++i) s[i] = states[read_slots[b] * state_size() + h * head_size + i];
    auto load = [&](const GuardedBuffer<T>& from, int64_t token, double factor, std::vector<double>& unit) {
      double squares = kEps;
      for (int64_t d = 0; d < keys; ++d) {
        unit[d] = to_float(from[(token * shape.key_heads + key_head) * keys + d]);
        squares += unit[d] * unit[d];
      }
      for (double& value : unit) value *= factor / std::sqrt(squares);
    };
    for (int64_t token = starts[b]; token < starts[b + 1]; ++token) {
      load(q, token, 0.25, unit_q);
      load(k, token, 1.0, unit_k);
      const double decay = std::exp(static_cast<double>(g[token * shape.value_heads + h]));
      for (int64_t c = 0; c < values; ++c) {
        double read = 0, result = 0;
        for (int64_t d = 0; d < keys; ++d) read += (s[d * values + c] *= decay) * unit_k[d];
        const int64_t place = (token * shape.value_heads + h) * values + c;
        const double change = beta[token * shape.value_heads + h] * (to_float(v[place]) - read);
        for (int64_t d = 0; d < keys; ++d) result += (s[d * values + c] += unit_k[d] * change) * unit_q[d];
        expected[place] = result;
      }
      const bool last = token + 1 == starts[b + 1];
      const int32_t slot = write_slots.size() ? write_slots[token] : last ? read_slots[b] : -1;
      if (slot < 0) continue;
      for (int64_t i = 0; i < head_size; ++i) expected_states[slot * state_size() + h * head_size + i] = s[i];
    }
  }

  struct Result {
    std::vector<double> out, states;
  };

  Result by_definition() const {
    Result expected = {std::vector<double>(out.size()), std::vector<double>(states.size())};
    for (int64_t i = 0; i < states.size(); ++i) expected.states[i] = states[i];
    for (int64_t b = 0; b < num_sequences; ++b)
      for (int64_t h = 0; h < shape.value_heads; ++h) run_head(b, h, expected.out, expected.states);
    return expected;
  }

  void check(const Result& expected, const std::string& label) const {
    gated_delta_rule(args());
    check_close(out.data(), expected.out.data(), out.size(), 2e-5, label);
    check_close(states.data(), expected.states.data(), states.size(), kIsBf16<T> ? 1e-4 : 1e-5, label + ", states");
  }

  Shape shape;
  int64_t num_tokens, num_sequences;
  GuardedBuffer<T> q, k, v, out;
  GuardedBuffer<float> g, beta, states;
  GuardedBuffer<int32_t> starts, read_slots, write_slots;
};

// Checks every level. Plain loops in double take longer than all of them: their result is computed once.
template <class T>
void check_levels(const Shape& shape, bool keep_all) {
  const std::string label = std::string("gated_delta_rule, ") + std::to_string(shape.key_width) + " x " +
                            std::to_string(shape.value_width) + ", first length " + std::to_string(shape.lengths[0]) +
                            (kIsBf16<T> ? ", bf16" : "");
  const auto expected = Case<T>(shape, Edge::end, keep_all).by_definition();
  for_each_isa([&] {
    for (Edge edge : {Edge::end, Edge::start}) Case<T>(shape, edge, keep_all).check(expected, label);
  });
}

void check_all(const Shape& shape, bool keep_all) {
  check_levels<float>(shape, keep_all);
  check_levels<bf16>(shape, keep_all);
}

TEST(gated_delta_steps_match_plain_loops) {
  for (int64_t width : {1, 3, 8, 15, 16, 17, 33, 64, 65, 80})
    for (bool keep_all : {false, true}) check_all({{1, 3, 0, 1}, 1, 2, width, width + 3}, keep_all);
  check_all({{12, 1}, 2, 2, 20, 128}, false);
}

TEST(gated_delta_chunks_match_plain_loops) {
  for (int64_t width : {1, 15, 16, 31, 32, 33, 65}) check_all({{13, 65}, 1, 2, width, width + 1}, false);
  check_all({{32, 64, 33}, 2, 2, 40, 24}, false);
  check_all({{130}, 1, 3, 128, 96}, false);
  check_all({{70, 13}, 1, 1, 24, 40}, true);
}

TEST(gated_delta_of_no_tokens_touches_nothing) { check_all({{0, 0}, 1, 2, 8, 8}, false); }

}  // namespace
}  // namespace tilewright::testing
