// Whisper's log-mel spectrogram of mono samples at 16 kHz.
//
//   frame t     samples 160 t - 200 to 160 t + 199, mirrored at both ends, times a periodic Hann window
//   power       |DFT|^2 of it, 201 frequencies
//   log         log10(max(sum over frequencies of filters * power, 1e-10)), a value for each mel bin
//   y           (max(log, largest log of all frames - 8) + 4) / 4
//
// samples [N], N at least 201; filters [bins, 201], each zero outside of one run; y [N / 160, bins]. All fp32.
#pragma once

#include <cstdint>

#include "base/rows.h"

namespace tilewright {

inline constexpr int64_t kMelWindow = 400, kMelHop = 160;
inline constexpr int64_t kMelPoints = kMelWindow / 2;           // of the complex transform that a real one is made of
inline constexpr int64_t kMelFrequencies = kMelWindow / 2 + 1;  // of the result

// Frequencies [begin, end) at which a bin's filter is not zero.
struct MelRange {
  int64_t begin = 0, end = 0;
};

struct MelTables {
  float window[kMelWindow];
  float cosines[kMelWindow], sines[kMelWindow];  // of -2 pi k / 400
};

struct MelArgs {
  const float* samples = nullptr;
  int64_t num_samples = 0;
  Rows filters, y;
  int64_t num_frames = 0, num_bins = 0;
  // Set by log_mel.
  const MelRange* ranges = nullptr;  // [bins]
  const MelTables* tables = nullptr;
};

void log_mel(const MelArgs& args);

struct MelKernels {
  // Writes the logs of frames [begin, end) to y, and returns the largest.
  float (*logs)(const MelArgs& args, int64_t begin, int64_t end);
  // Turns the logs of frames [begin, end) into results; `lowest` is 8 below the largest of all.
  void (*finish)(const MelArgs& args, float lowest, int64_t begin, int64_t end);
};

}  // namespace tilewright
