// Turns logits [rows, V] into tokens, without sorting the vocabulary. All ops read NaN as -inf and +inf as the largest
// float, compute in fp32 and sum in fp64; each row is computed by one thread, so the result depends on nothing else.
//
//   penalize       in place, for the tokens listed for a row:
//                    repetition  x = x > 0 ? x / r : x * r      every listed token (of the prompt or the output)
//                    frequency   x -= frequency * count         count: times in the output, 0 for prompt-only tokens
//                    presence    x -= presence if count > 0
//                  then x += bias for the tokens of a second list.
//   mask           in place, for the rows named: x = -inf for every token whose bit is 0; the others stay as they are
//   sample         weight = exp((x - max) / temperature) of the tokens kept; the token is the first whose running sum
//   of
//                  weights, in vocabulary order, exceeds uniform * total. Kept is every x at or above a threshold, the
//                  highest of:
//                    top_k   the k-th largest x (0: off)
//                    top_p   the largest t such that the tokens >= t have a share >= p of what top_k kept (1: off)
//                    min_p   weight >= min_p of the largest (0: off)
//                  Ties at a threshold are kept. Weights below e^-87 count as 0. Temperature 0 is the largest x, the
//                  lowest index among equals. A row without a finite x, or +inf, gives token 0.
//   probabilities  weight / total of the tokens kept, 0 elsewhere
//   log_probs      log softmax of the raw logits for one given token, its rank (from 1; among equals the lower index is
//                  ahead), and the top_n best
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace tilewright {

struct LogitRows {
  void* data = nullptr;
  int64_t stride = 0;  // in elements
  int64_t rows = 0, vocabulary = 0;
  DType dtype = DType::f32;
};

// A list for each row: entries [starts[row], starts[row + 1]).
struct PenaltyArgs {
  LogitRows logits;
  const int64_t* starts = nullptr;
  const int64_t* token_ids = nullptr;
  const int32_t* counts = nullptr;
  const float *repetition = nullptr, *presence = nullptr, *frequency = nullptr;  // [rows]
  const int64_t* bias_starts = nullptr;                                          // optional
  const int64_t* bias_token_ids = nullptr;
  const float* bias = nullptr;
};

// A row of bits for each of `count` rows: token i has bit i % 32 of word i / 32.
struct MaskArgs {
  LogitRows logits;               // fp32
  const int64_t* rows = nullptr;  // [count], each once
  int64_t count = 0;
  const int32_t* words = nullptr;  // [count, at least vocabulary / 32 rounded up]
  int64_t word_stride = 0;
};

struct SampleArgs {
  LogitRows logits;
  const float* temperature = nullptr;  // all [rows]
  const int64_t* top_k = nullptr;
  const float* top_p = nullptr;
  const float* min_p = nullptr;
  const double* uniform = nullptr;  // sample only
  int64_t* token_ids = nullptr;     // sample only
  float* probabilities = nullptr;   // probabilities only
  int64_t probability_stride = 0;
};

struct LogProbArgs {
  LogitRows logits;
  const int64_t* token_ids = nullptr;
  float* token_log_probs = nullptr;
  int64_t* ranks = nullptr;
  int64_t top_n = 0;
  int64_t* top_ids = nullptr;  // [rows, top_n], best first
  float* top_log_probs = nullptr;
};

void penalize(const PenaltyArgs& args);
void mask(const MaskArgs& args);
void sample(const SampleArgs& args);
void probabilities(const SampleArgs& args);
void log_probs(const LogProbArgs& args);

struct SampleKernels {
  void (*sample)(const SampleArgs& args, int64_t row_begin, int64_t row_end);
  void (*probabilities)(const SampleArgs& args, int64_t row_begin, int64_t row_end);
  void (*log_probs)(const LogProbArgs& args, int64_t row_begin, int64_t row_end);  // the top_n in no order
  void (*mask)(float* logits, const int32_t* words, int64_t size);
};

}  // namespace tilewright
