// Rotary position embedding. Tables in fp32, x in bf16 or fp32, fp32 inside, one rounding at the store.
//
//   rope_table  angle[t, j] = positions[axis_of_frequency[j], t] * inv_freq[j]   (one fp32 rounding)
//               cos[t, j], sin[t, j] = cos(angle), sin(angle), times attention_scaling
//   rope        for each pair (a, b) of a head:  a' = a cos - b sin,  b' = b cos + a sin
//               pair j is (x[j], x[j + R/2]), or (x[2j], x[2j+1]) when interleaved; x[R:] is copied
//               with weights: x is RMS-normed over the head first, x / sqrt(mean(x^2) + eps) * w
//
// One table mechanism covers plain rope (one axis), M-RoPE (time, row, column) and vision rope (row, column).
#pragma once

#include <cstdint>

#include "base/rows.h"

namespace tilewright {

struct RopeTableArgs {
  const void* positions = nullptr;  // [A, T] int64 or fp32
  int64_t axis_stride = 0;          // between axes, in elements
  DType position_dtype;
  const float* inv_freq = nullptr;             // [R/2]
  const int32_t* axis_of_frequency = nullptr;  // [R/2], each in [0, A)
  float attention_scaling = 1;
  float *cos = nullptr, *sin = nullptr;  // [T, R/2]
  int64_t num_tokens = 0, num_frequencies = 0;
};

// [T, H, K]; y may be x.
struct RopeHeads {
  Heads x, y;  // of one type, common to all parts
  int64_t num_heads = 0;
  const float* norm_weight = nullptr;  // [K], or null: no norm
};

struct RopeArgs {
  RopeHeads parts[2];  // q and k share a pass: the table row stays in L1
  int num_parts = 1;
  const float *cos = nullptr, *sin = nullptr;
  int64_t table_stride = 0;
  int64_t num_tokens = 0, head_width = 0, num_frequencies = 0;
  bool interleaved = false;
  float eps = 0;
};

void rope_table(const RopeTableArgs& args);
void rope(const RopeArgs& args);

struct RopeKernels {
  void (*table)(const RopeTableArgs& args, int64_t token_begin, int64_t token_end);
  void (*rope)(const RopeArgs& args, int64_t token_begin, int64_t token_end);
};

}  // namespace tilewright
