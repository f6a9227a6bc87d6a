// Every convolution kernel of this machine against plain loops in double, at odd sizes, between guard pages.
#include <cmath>
#include <string>
#include <vector>

#include "kernels/conv/conv.h"
#include "testing/testing.h"

namespace tilewright::testing {
namespace {

// Slot b holds the state of sequence b; the first sequence has none.
template <class T, class W, class S>
void check_conv(const std::vector<int32_t>& lengths, int64_t channels, int width, Edge edge, bool keep_all) {
  const int64_t num_sequences = static_cast<int64_t>(lengths.size());
  GuardedBuffer<int32_t> starts(num_sequences + 1, edge), read_slots(num_sequences, edge);
  starts[0] = 0;
  for (int64_t b = 0; b < num_sequences; ++b) {
    starts[b + 1] = starts[b] + lengths[b];
    read_slots[b] = b ? static_cast<int32_t>(b) : -1;
  }
  const int64_t num_tokens = starts[num_sequences], state_size = (width - 1) * channels;
  GuardedBuffer<T> x(num_tokens * channels, edge), y(num_tokens * channels, edge);
  GuardedBuffer<W> weight(width * channels, edge), bias(channels, edge);
  GuardedBuffer<S> states((num_sequences + num_tokens) * state_size, edge);
  GuardedBuffer<int32_t> write_slots(num_tokens, edge);
  Random random(static_cast<uint64_t>(channels * 8 + width));
  x.fill(random);
  weight.fill(random);
  bias.fill(random);
  states.fill(random);
  // A sequence's first token overwrites the state it read, which later tokens still need.
  for (int64_t b = 0; b < num_sequences; ++b)
    for (int32_t token = starts[b]; token < starts[b + 1]; ++token)
      write_slots[token] = token == starts[b] ? read_slots[b] : static_cast<int32_t>(num_sequences + token);

  std::vector<double> expected(y.size()), expected_states(states.size());
  for (int64_t i = 0; i < states.size(); ++i) expected_states[i] = to_float(states[i]);
  for (int64_t b = 0; b < num_sequences; ++b) {
    auto input = [&](int64_t token, int64_t c) -> double {
      if (token >= starts[b]) return to_float(x[token * channels + c]);
      const int64_t row = token - starts[b] + width - 1;
      return read_slots[b] < 0 ? 0.0 : to_float(states[read_slots[b] * state_size + row * channels + c]);
    };
    for (int64_t token = starts[b]; token < starts[b + 1]; ++token) {
      const bool last = token + 1 == starts[b + 1];
      const int32_t slot = keep_all ? write_slots[token] : last ? read_slots[b] : -1;
      for (int64_t c = 0; c < channels; ++c) {
        double sum = to_float(bias[c]);
        for (int i = 0; i < width; ++i) sum += to_float(weight[i * channels + c]) * input(token - width + 1 + i, c);
        expected[token * channels + c] = sum / (1.0 + std::exp(-sum));
        for (int row = 0; slot >= 0 && row < width - 1; ++row)
          expected_states[slot * state_size + row * channels + c] = input(token - width + 2 + row, c);
      }
    }
  }

  ConvArgs args = {};
  args.x = rows_of(x, channels);
  args.y = rows_of(y, channels);
  args.weight = weight.data();
  args.bias = bias.data();
  args.weight_dtype = dtype_of<W>();
  args.states = rows_of(states, state_size);
  args.sequences = {starts.data(), read_slots.data(), keep_all ? write_slots.data() : nullptr, num_sequences};
  args.channels = channels;
  args.width = width;
  causal_conv(args);
  const std::string label = "causal_conv, " + std::to_string(channels) + " channels, width " + std::to_string(width);
  check_close(y.data(), expected.data(), y.size(), 1e-5, label);
  check_close(states.data(), expected_states.data(), states.size(), 1e-7, label + ", states");
}

TEST(causal_conv_matches_plain_loops) {
  for_each_isa([] {
    for (Edge edge : {Edge::end, Edge::start})
      for (bool keep_all : {false, true})
        for (int width : {1, 2, 4, 9})
          for (int64_t channels : {1, 7, 16, 17, 35, 64}) {
            const std::vector<int32_t> lengths = {1, 2, 0, 9, 40};
            check_conv<float, float, float>(lengths, channels, width, edge, keep_all);
            check_conv<bf16, bf16, float>(lengths, channels, width, edge, keep_all);
            check_conv<bf16, float, bf16>(lengths, channels, width, edge, keep_all);
          }
  });
}

// Wider than a piece of 32 tokens: the second piece of a sequence still reads its state.
TEST(causal_conv_wider_than_a_piece) {
  for_each_isa([] {
    for (Edge edge : {Edge::end, Edge::start})
      for (bool keep_all : {false, true}) check_conv<bf16, float, float>({1, 40, 80}, 17, 35, edge, keep_all);
  });
}

TEST(causal_conv_cuts_many_channels) {
  for_each_isa([] { check_conv<bf16, bf16, float>({1, 33}, 2051, 4, Edge::end, false); });
}

}  // namespace
}  // namespace tilewright::testing
