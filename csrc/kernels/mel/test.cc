// Log-mel frames of every level against plain loops in double: lengths that end anywhere, odd numbers of bins.
#include "kernels/mel/mel.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "testing/testing.h"

namespace tilewright::testing {
namespace {

double sample_at(const GuardedBuffer<float>& samples, int64_t at) {
  const int64_t last = samples.size() - 1;
  if (at < 0) at = -at;
  if (at > last) at = 2 * last - at;
  return samples[at];
}

std::vector<double> expected_of(const GuardedBuffer<float>& samples, const GuardedBuffer<float>& filters,
                                int64_t num_bins) {
  const int64_t num_frames = samples.size() / kMelHop;
  std::vector<double> logs;
  for (int64_t frame = 0; frame < num_frames; ++frame) {
    std::vector<double> power;
    for (int64_t k = 0; k < kMelFrequencies; ++k) {
      double re = 0, im = 0;
      for (int64_t i = 0; i < kMelWindow; ++i) {
        const double turn = 2 * M_PI * static_cast<double>(k * i % kMelWindow) / kMelWindow;
        const double window = 0.5 - 0.5 * std::cos(2 * M_PI * static_cast<double>(i) / kMelWindow);
        const double value = window * sample_at(samples, frame * kMelHop - kMelWindow / 2 + i);
        re += value * std::cos(turn);
        im -= value * std::sin(turn);
      }
      power.push_back(re * re + im * im);
    }
    for (int64_t bin = 0; bin < num_bins; ++bin) {
      double sum = 0;
      for (int64_t k = 0; k < kMelFrequencies; ++k)
        sum += filters[bin * kMelFrequencies + k] * power[static_cast<size_t>(k)];
      logs.push_back(std::log10(std::max(sum, 1e-10)));
    }
  }
  const double lowest = *std::max_element(logs.begin(), logs.end()) - 8;
  for (double& log : logs) log = (std::max(log, lowest) + 4) / 4;
  return logs;
}

void check_log_mel(int64_t num_samples, int64_t num_bins, float loudness, Edge edge) {
  Random random(static_cast<uint64_t>(num_samples));
  GuardedBuffer<float> samples(num_samples, edge), filters(num_bins * kMelFrequencies, edge);
  samples.fill(random, loudness);
  // Runs of positive weights; the first bin has none at all.
  for (int64_t bin = 0; bin < num_bins; ++bin)
    for (int64_t k = 0; k < kMelFrequencies; ++k)
      filters[bin * kMelFrequencies + k] = bin > 0 && k >= 3 * bin && k < 5 * bin + 2 ? 1.5f + random.value() : 0.0f;
  const int64_t num_frames = num_samples / kMelHop, stride = num_bins + 3;
  GuardedBuffer<float> y(num_frames * stride, edge);
  MelArgs args;
  args.samples = samples.data();
  args.num_samples = num_samples;
  args.filters = rows_of(filters, kMelFrequencies);
  args.y = rows_of(y, stride);
  args.num_frames = num_frames;
  args.num_bins = num_bins;
  log_mel(args);
  const std::vector<double> expected = expected_of(samples, filters, num_bins);
  for (int64_t frame = 0; frame < num_frames; ++frame) {
    check_close(y.data() + frame * stride, expected.data() + frame * num_bins, num_bins, 2e-5,
                "frame " + std::to_string(frame) + " of " + std::to_string(num_samples) + " samples");
    for (int64_t i = num_bins; i < stride; ++i) CHECK(std::isnan(y[frame * stride + i]));
  }
}

TEST(log_mel_matches_plain_loops) {
  for_each_isa([] {
    for (Edge edge : {Edge::end, Edge::start}) {
      for (int64_t num_samples : {201, 320, 479, 1761, 3000}) check_log_mel(num_samples, 17, 0.3f, edge);
      for (int64_t num_bins : {1, 2, 16, 33}) check_log_mel(900, num_bins, 0.3f, edge);
      check_log_mel(640, 8, 0.0f, edge);  // silence
    }
  });
}

}  // namespace
}  // namespace tilewright::testing
