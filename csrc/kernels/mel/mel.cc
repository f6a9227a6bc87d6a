#include "kernels/mel/mel.h"

#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "base/parallel.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(mel, MelKernels)

namespace {

constexpr float kBelowLargest = 8.0f;
// A frame takes 4 us on one core, waking the team as long: 0.3 seconds of sound per thread.
constexpr int64_t kGrain = 32;

MelTables make_tables() {
  MelTables tables;
  for (int64_t k = 0; k < kMelWindow; ++k) {
    const double angle = -2.0 * M_PI * static_cast<double>(k) / static_cast<double>(kMelWindow);
    tables.cosines[k] = static_cast<float>(std::cos(angle));
    tables.sines[k] = static_cast<float>(std::sin(angle));
    tables.window[k] = static_cast<float>(0.5 - 0.5 * std::cos(angle));
  }
  return tables;
}

std::vector<MelRange> ranges_of(const MelArgs& args) {
  std::vector<MelRange> ranges(static_cast<size_t>(args.num_bins));
  for (int64_t bin = 0; bin < args.num_bins; ++bin) {
    const float* filter = args.filters.row<float>(bin);
    MelRange& range = ranges[static_cast<size_t>(bin)];
    range.end = kMelFrequencies;
    while (range.end > 0 && filter[range.end - 1] == 0.0f) --range.end;
    while (range.begin < range.end && filter[range.begin] == 0.0f) ++range.begin;
  }
  return ranges;
}

void raise(std::atomic<float>& largest, float value) {
  float seen = largest.load(std::memory_order_relaxed);
  while (value > seen && !largest.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

void log_mel(const MelArgs& given) {
  static const MelTables tables = make_tables();
  const std::vector<MelRange> ranges = ranges_of(given);
  MelArgs args = given;
  args.tables = &tables;
  args.ranges = ranges.data();
  const MelKernels& kernels = select(kTable);
  std::atomic<float> largest{-std::numeric_limits<float>::infinity()};
  parallel_chunks(args.num_frames, kGrain,
                  [&](int64_t begin, int64_t end) { raise(largest, kernels.logs(args, begin, end)); });
  const float lowest = largest.load() - kBelowLargest;
  parallel_chunks(args.num_frames, 16 * kGrain,
                  [&](int64_t begin, int64_t end) { kernels.finish(args, lowest, begin, end); });
}

}  // namespace tilewright
