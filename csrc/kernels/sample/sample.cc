#include "kernels/sample/sample.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "base/bf16.h"
#include "base/parallel.h"
#include "base/tile.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(sample, SampleKernels)

namespace {

template <class T>
void penalize_row(const PenaltyArgs& args, int64_t row) {
  T* logits = static_cast<T*>(args.logits.data) + row * args.logits.stride;
  const float repetition = args.repetition[row], presence = args.presence[row], frequency = args.frequency[row];
  for (int64_t i = args.starts[row]; i < args.starts[row + 1]; ++i) {
    T& logit = logits[args.token_ids[i]];
    float value = to_float(logit);
    value = value > 0 ? value / repetition : value * repetition;
    if (args.counts[i] > 0) value -= frequency * static_cast<float>(args.counts[i]) + presence;
    assign(logit, value);
  }
  if (!args.bias) return;
  for (int64_t i = args.bias_starts[row]; i < args.bias_starts[row + 1]; ++i) {
    T& logit = logits[args.bias_token_ids[i]];
    assign(logit, to_float(logit) + args.bias[i]);
  }
}

struct TopEntry {
  float logit, log_prob;
  int64_t id;

  // Ordered by the logit: two that differ may have the same rounded log-probability.
  bool operator<(const TopEntry& other) const {
    if (logit > other.logit || other.logit > logit) return logit > other.logit;
    return id < other.id;
  }
};

// Best first; among equals the lower index.
void sort_top(const LogProbArgs& args, int64_t row) {
  int64_t* ids = args.top_ids + row * args.top_n;
  float* log_probs = args.top_log_probs + row * args.top_n;
  std::vector<TopEntry> entries(static_cast<size_t>(args.top_n));
  for (size_t i = 0; i < entries.size(); ++i) {
    const int64_t at = row * args.logits.stride + ids[i];
    const float logit = args.logits.dtype == DType::bf16 ? to_float(static_cast<const bf16*>(args.logits.data)[at])
                                                         : static_cast<const float*>(args.logits.data)[at];
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    entries[i] = {logit > -kInfinity ? logit : -kInfinity, log_probs[i], ids[i]};
  }
  std::sort(entries.begin(), entries.end());
  for (size_t i = 0; i < entries.size(); ++i) {
    log_probs[i] = entries[i].log_prob;
    ids[i] = entries[i].id;
  }
}

}  // namespace

void penalize(const PenaltyArgs& args) {
  const int64_t rows = args.logits.rows;
  const int64_t entries = args.starts[rows] + (args.bias ? args.bias_starts[rows] : 0);
  parallel_chunks(rows, grain_for(rows, rows ? entries * 64 / rows : 0), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (args.logits.dtype == DType::bf16)
        penalize_row<bf16>(args, row);
      else
        penalize_row<float>(args, row);
    }
  });
}

void mask(const MaskArgs& args) {
  const auto kernel = select(kTable).mask;
  // Rows are cut into pieces of whole words, so that the few rows of a small batch keep all threads busy.
  constexpr int64_t kPiece = 16384;
  const int64_t vocabulary = args.logits.vocabulary, pieces = ceil_div(vocabulary, kPiece);
  parallel_for(args.count * pieces, [&](int64_t task) {
    const int64_t entry = task / pieces, begin = task % pieces * kPiece;
    float* logits = static_cast<float*>(args.logits.data) + args.rows[entry] * args.logits.stride + begin;
    kernel(logits, args.words + entry * args.word_stride + begin / 32, std::min(kPiece, vocabulary - begin));
  });
}

void sample(const SampleArgs& args) {
  const auto kernel = select(kTable).sample;
  parallel_chunks(args.logits.rows, 1, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void probabilities(const SampleArgs& args) {
  const auto kernel = select(kTable).probabilities;
  parallel_chunks(args.logits.rows, 1, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void log_probs(const LogProbArgs& args) {
  const auto kernel = select(kTable).log_probs;
  parallel_chunks(args.logits.rows, 1, [&](int64_t begin, int64_t end) {
    kernel(args, begin, end);
    for (int64_t row = begin; row < end; ++row) sort_top(args, row);
  });
}

}  // namespace tilewright
