// The softmax of one block of scores, and the merging of blocks. Include after a Vec.
#pragma once

#include "base/vec/math.h"
#include "kernels/attention/attention.h"

namespace tilewright {
namespace {

inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kMinusInfinity = -__builtin_inff();
inline constexpr float kNan = __builtin_nanf("");

// 2^t for t <= 0, and exactly 1 for t = 0: merging with a block that a row does not see must change nothing.
template <bool kPrecise>
inline Vec exp2_nonpositive(Vec t) {
  if constexpr (!Vec::kScaleUnderflows) t = max(Vec::set1(-126.0f), t);
  const Vec n = round(t);
  return scale_by_power_of_2(exp2_fraction<!kPrecise>(t - n), n);
}

// The keys of a block that a row sees, and the treatment of its scores.
struct RowRules {
  int begin, end;    // keys of the block that are seen
  float scale;       // of the raw product, with log2(e) in it
  float soft_cap;    // in units of log2(e) too; 0 for none
  const void* mask;  // of the block's first key; null for none
  DType mask_dtype;
};

inline Vec masked_score(Vec t, const RowRules& rules, int i) {
  if (rules.soft_cap > 0) t = Vec::set1(rules.soft_cap) * tanh(t * Vec::set1(1.0f / rules.soft_cap));
  const Vec hidden = Vec::set1(kMinusInfinity);
  if (rules.mask) {
    // Read only the mask of keys that exist: the last block may end mid-vector.
    const int64_t count = rules.end - i < 0 ? 0 : rules.end - i;
    if (rules.mask_dtype == DType::boolean) {
      uint8_t flags[Vec::kLanes] = {};
      const uint8_t* mask = static_cast<const uint8_t*>(rules.mask) + i;
      for (int lane = 0; lane < Vec::kLanes && lane < count; ++lane) flags[lane] = mask[lane];
      t = keep_flagged(t, flags, hidden);
    } else if (rules.mask_dtype == DType::bf16) {
      t = fma(Vec::load(static_cast<const bf16*>(rules.mask) + i, count), Vec::set1(kLog2E), t);
    } else {
      t = fma(Vec::load(static_cast<const float*>(rules.mask) + i, count), Vec::set1(kLog2E), t);
    }
  }
  return keep_lanes(t, rules.begin - i, rules.end - i, hidden);
}

// Scores are in whole value tiles of 32 keys. Maxima and sums run in one chain per vector of those 32, so that no chain
// waits for itself, and both functions below add in the same order.
inline constexpr int kChains = kTileDepth / Vec::kLanes;

inline float reduce_chains_add(const Vec (&chains)[kChains]) {
  Vec all = chains[0];
  for (int c = 1; c < kChains; ++c) all = all + chains[c];
  return reduce_add(all);
}

inline bool has_nan(const float* values, int count) {
  for (int i = 0; i < count; ++i)
    if (values[i] != values[i]) return true;
  return false;
}

// Weights 2^(score * scale - maximum) of a row, a value tile's depth of keys at a time, and their sum.
template <class P>
class Weigher {
 public:
  Weigher(float scale, float maximum) : scale_(Vec::set1(scale)), offset_(Vec::set1(-maximum)) {
    for (Vec& total : totals_) total = Vec::zero();
  }

  void weigh(const float* scores, P* weights) {
    Vec p[kChains];
    for (int c = 0; c < kChains; ++c) {
      p[c] = exp2_nonpositive<kPrecise>(fma(Vec::load(scores + c * Vec::kLanes), scale_, offset_));
      totals_[c] = totals_[c] + p[c];
    }
    for (int c = 0; c < kChains; ++c) p[c].store(weights + c * Vec::kLanes);
  }

  // Weighs keys of which some are hidden: their scores are -inf, and only those in [begin, end) count.
  void weigh_seen(const float* scores, P* weights, int64_t begin, int64_t end) {
    for (int c = 0; c < kChains; ++c) {
      const int at = c * Vec::kLanes;
      // -inf becomes a finite power that underflows: -inf - round(-inf) would be NaN.
      const Vec t = max(Vec::set1(-1000.0f), fma(Vec::load(scores + at), scale_, offset_));
      const Vec p = keep_lanes(exp2_nonpositive<kPrecise>(t), begin - at, end - at, Vec::zero());
      p.store(weights + at);
      totals_[c] = totals_[c] + p;
    }
  }

  float sum() const { return reduce_chains_add(totals_); }

  // Whether one of these scores is NaN without showing in the sum; their maximum was computed after `watch_for_nan`.
  static void watch_for_nan() {}
  static bool hides_nan(const float*, int, float) { return false; }

 private:
  static constexpr bool kPrecise = std::is_same_v<P, float>;
  Vec scale_, offset_;
  Vec totals_[kChains];
};

// Replaces scores [width] by weights 2^(score - maximum), with every rule applied. In place: weights are no wider than
// scores and are written behind the read position.
template <class P>
inline void softmax_row_with_rules(float* scores, int width, const RowRules& rules, P* weights, float* maximum,
                                   float* sum) {
  // Without a cap or a mask the scale is applied after the subtraction, as in softmax_row: both give the same bits.
  const bool scale_first = rules.soft_cap > 0 || rules.mask;
  const float early = scale_first ? rules.scale : 1.0f, late = scale_first ? 1.0f : rules.scale;
  Vec highest = Vec::set1(kMinusInfinity);
  for (int i = 0; i < width; i += Vec::kLanes) {
    const Vec t = masked_score(Vec::load(scores + i) * Vec::set1(early), rules, i);
    t.store(scores + i);
    highest = max(highest, t);
  }
  const float best = reduce_max(highest);
  // The maximum skips NaN: a row that sees only NaN differs from one that sees no key.
  const bool none = best == kMinusInfinity && !(rules.begin < rules.end && has_nan(scores, width));
  *maximum = none ? best : best * late;
  const int64_t begin = none ? 0 : rules.begin, end = none ? 0 : rules.end;
  const float reference = none ? 0.0f : *maximum;
  const bool hides_nan = Weigher<P>::hides_nan(scores, width, reference);
  Weigher<P> weigher(late, reference);
  for (int i = 0; i < width; i += kTileDepth) weigher.weigh_seen(scores + i, weights + i, begin - i, end - i);
  *sum = hides_nan ? kNan : weigher.sum();
}

// Returns the lane-wise maximum of scores [width] and `highest`.
inline Vec highest_score(const float* scores, int width, Vec highest) {
  Vec chains[kChains];
  for (int c = 0; c < kChains; ++c) chains[c] = Vec::load(scores + c * Vec::kLanes);
  for (int i = kTileDepth; i < width; i += kTileDepth)
    for (int c = 0; c < kChains; ++c) chains[c] = max(chains[c], Vec::load(scores + i + c * Vec::kLanes));
  for (int c = 0; c < kChains; ++c) highest = max(highest, chains[c]);
  return highest;
}

// Weighs a row that sees the whole block, has no rules but the scale, as nearly every row, and whose maximum is known.
template <class P>
inline void weigh_row(const float* scores, int width, float scale, P* weights, float maximum, float* sum) {
  const bool hides_nan = Weigher<P>::hides_nan(scores, width, maximum);
  Weigher<P> weigher(scale, maximum);
#pragma GCC unroll 4
  for (int i = 0; i < width; i += kTileDepth) weigher.weigh(scores + i, weights + i);
  *sum = hides_nan ? kNan : weigher.sum();
}

template <class P>
inline void softmax_row(const float* scores, int width, float scale, P* weights, float* maximum, float* sum) {
  *maximum = reduce_max(highest_score(scores, width, Vec::set1(kMinusInfinity))) * scale;
  weigh_row(scores, width, scale, weights, *maximum, sum);
}

// Result of a block of keys: for each row the highest score and the sum of weights, and weights times values.
struct Partial {
  float *maximum, *sum;  // [rows]
  float* output;         // [rows, width]
};

// Sets rows past the last one of an item to those of a block in which nothing is seen.
inline void clear_partial(float (&maximum)[kQueryRows], float (&sum)[kQueryRows]) {
  for (int r = 0; r < kQueryRows; ++r) maximum[r] = kMinusInfinity, sum[r] = 0;
}

// Running maximum, sum and output of up to kQueryRows rows.
struct Accumulator {
  alignas(64) float maximum[kQueryRows];
  alignas(64) float sum[kQueryRows];
  float* output;  // [rows, width]

  Accumulator(float* output, int rows, int64_t width) : output(output) {
    clear_partial(maximum, sum);
    for (int64_t i = 0; i < rows * width; i += Vec::kLanes) Vec::zero().store(output + i);
  }

  // Merges a block; its maxima and sums are read in whole vectors, [kQueryRows].
  void merge(const Partial& block, int rows, int64_t width) {
    alignas(64) float keep[kQueryRows], take[kQueryRows];
    for (int r = 0; r < rows; r += Vec::kLanes) {
      const Vec before = Vec::load(maximum + r), other = Vec::load(block.maximum + r);
      const Vec now = max(before, other);
      // Rows that have seen nothing yet: -inf - -inf is NaN, and what it would scale is 0 anyway.
      const Vec reference = max(Vec::set1(-3.0e38f), now), least = Vec::set1(-1000.0f);
      const Vec k = exp2_nonpositive<true>(max(least, before - reference));
      const Vec t = exp2_nonpositive<true>(max(least, other - reference));
      k.store(keep + r);
      t.store(take + r);
      now.store(maximum + r);
      fma(Vec::load(sum + r), k, Vec::load(block.sum + r) * t).store(sum + r);
    }
    for (int r = 0; r < rows; ++r) {
      const Vec k = Vec::set1(keep[r]), t = Vec::set1(take[r]);
      float* to = output + r * width;
      const float* from = block.output + r * width;
      for (int64_t i = 0; i < width; i += Vec::kLanes) fma(Vec::load(to + i), k, Vec::load(from + i) * t).store(to + i);
    }
  }
};

}  // namespace
}  // namespace tilewright
