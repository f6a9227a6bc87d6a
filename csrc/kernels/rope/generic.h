// Rope of a range of tokens in terms of Vec; each ISA file includes this after its Vec.
#pragma once

#include <cmath>
#include <cstring>

#include "base/vec/row.h"
#include "base/vec/sincos.h"
#include "kernels/rope/rope.h"

namespace tilewright {
namespace {

template <class Position>
void table_row(const RopeTableArgs& args, int64_t token) {
  const Position* positions = static_cast<const Position*>(args.positions) + token;
  float* cos_row = args.cos + token * args.num_frequencies;
  float* sin_row = args.sin + token * args.num_frequencies;
  const Vec scaling = Vec::set1(args.attention_scaling);
  for_each_vec(args.num_frequencies, [&](int64_t i, auto count) {
    float angle[Vec::kLanes] = {};
    for (int lane = 0; lane < count; ++lane)
      angle[lane] =
          static_cast<float>(positions[args.axis_of_frequency[i + lane] * args.axis_stride]) * args.inv_freq[i + lane];
    Vec sine, cosine;
    sincos(Vec::load(angle), sine, cosine);
    store_some(cosine * scaling, cos_row + i, count);
    store_some(sine * scaling, sin_row + i, count);
  });
}

void rope_table_tokens(const RopeTableArgs& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token)
    args.position_dtype == DType::i64 ? table_row<int64_t>(args, token) : table_row<float>(args, token);
}

// The norm as a factor per element, scale * weight, or none.
struct NormFactor {
  const float* weight;
  Vec scale;
  template <class Count>
  Vec apply(Vec x, int64_t i, Count count) const {
    return x * scale * load_some(weight + i, count);
  }
  void apply_pair(Vec& even, Vec& odd, int64_t i) const {
    Vec even_weight, odd_weight;
    load_interleaved(weight + i, even_weight, odd_weight);
    even = even * scale * even_weight;
    odd = odd * scale * odd_weight;
  }
};

struct NoNorm {
  template <class Count>
  Vec apply(Vec x, int64_t, Count) const {
    return x;
  }
  void apply_pair(Vec&, Vec&, int64_t) const {}
};

template <class T, class Norm>
void rotate_halves(const T* x, T* y, const float* cos_row, const float* sin_row, int64_t half, const Norm& norm) {
  for_each_vec(half, [&](int64_t i, auto count) {
    const Vec a = norm.apply(load_some(x + i, count), i, count);
    const Vec b = norm.apply(load_some(x + half + i, count), half + i, count);
    const Vec c = load_some(cos_row + i, count), s = load_some(sin_row + i, count);
    store_some(a * c - b * s, y + i, count);
    store_some(fma(b, c, a * s), y + half + i, count);
  });
}

template <class T, class Norm>
void rotate_pairs(const T* x, T* y, const float* cos_row, const float* sin_row, int64_t half, const Norm& norm) {
  int64_t i = 0;
  const auto rotate = [](const T* from, T* to, Vec c, Vec s, const Norm& factor, int64_t at) {
    Vec a, b;
    load_interleaved(from, a, b);
    factor.apply_pair(a, b, at);
    store_interleaved(to, a * c - b * s, fma(b, c, a * s));
  };
  for (; i + Vec::kLanes <= half; i += Vec::kLanes)
    rotate(x + 2 * i, y + 2 * i, Vec::load(cos_row + i), Vec::load(sin_row + i), norm, 2 * i);
  if (i == half) return;
  // The last pairs go through whole vectors in a buffer: nothing beyond the head is touched.
  const int64_t left = half - i;
  T pairs[2 * Vec::kLanes] = {};
  std::memcpy(pairs, x + 2 * i, 2 * left * sizeof(T));
  const Vec c = Vec::load(cos_row + i, left), s = Vec::load(sin_row + i, left);
  if constexpr (std::is_same_v<Norm, NoNorm>) {
    rotate(pairs, pairs, c, s, norm, 0);
  } else {
    float weight[2 * Vec::kLanes] = {};
    std::memcpy(weight, norm.weight + 2 * i, 2 * left * sizeof(float));
    rotate(pairs, pairs, c, s, Norm{weight, norm.scale}, 0);
  }
  std::memcpy(y + 2 * i, pairs, 2 * left * sizeof(T));
}

// Prefetches the same head of the next token: after q and k of a packed row comes v, where the hardware prefetcher
// stops.
template <class T>
inline void prefetch_head(const T* x, int64_t width) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < width; i += kLine) prefetch(x + i);
}

template <class T, class Norm>
void rotate_head(const RopeArgs& args, const T* x, T* y, const float* cos_row, const float* sin_row, const Norm& norm) {
  if (args.interleaved)
    rotate_pairs(x, y, cos_row, sin_row, args.num_frequencies, norm);
  else
    rotate_halves(x, y, cos_row, sin_row, args.num_frequencies, norm);
  const int64_t rotated = 2 * args.num_frequencies, left = args.head_width - rotated;
  if (left == 0 || (std::is_same_v<Norm, NoNorm> && x == y)) return;
  for_each_vec(left, [&](int64_t i, auto count) {
    store_some(norm.apply(load_some(x + rotated + i, count), rotated + i, count), y + rotated + i, count);
  });
}

// Heads normed together: their sums, then their square roots, then their rotations. Each of these has a long latency,
// and a single head would wait for all three in turn.
constexpr int kHeadsAtOnce = 16;

template <class T>
void rotate_token(const RopeArgs& args, const RopeHeads& heads, int64_t token) {
  const float* cos_row = args.cos + token * args.table_stride;
  const float* sin_row = args.sin + token * args.table_stride;
  const T* x = heads.x.row<T>(token, 0);
  T* y = heads.y.row<T>(token, 0);
  if (!heads.norm_weight) {
    for (int64_t head = 0; head < heads.num_heads; ++head) {
      prefetch_head(x + heads.x.token_stride + head * heads.x.head_stride, args.head_width);
      rotate_head(args, x + head * heads.x.head_stride, y + head * heads.y.head_stride, cos_row, sin_row, NoNorm{});
    }
    return;
  }
  for (int64_t first = 0; first < heads.num_heads; first += kHeadsAtOnce) {
    const int count = static_cast<int>(heads.num_heads - first < kHeadsAtOnce ? heads.num_heads - first : kHeadsAtOnce);
    float scale[kHeadsAtOnce] = {};
    for (int i = 0; i < count; ++i) scale[i] = sum_of_squares(x + (first + i) * heads.x.head_stride, args.head_width);
    for (float& value : scale) value = 1.0f / std::sqrt(value / static_cast<float>(args.head_width) + args.eps);
    for (int i = 0; i < count; ++i) {
      prefetch_head(x + heads.x.token_stride + (first + i) * heads.x.head_stride, args.head_width);
      rotate_head(args, x + (first + i) * heads.x.head_stride, y + (first + i) * heads.y.head_stride, cos_row, sin_row,
                  NormFactor{heads.norm_weight, Vec::set1(scale[i])});
    }
  }
}

template <class T>
void rotate_tokens(const RopeArgs& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token)
    for (int part = 0; part < args.num_parts; ++part) rotate_token<T>(args, args.parts[part], token);
}

void rope_tokens(const RopeArgs& args, int64_t begin, int64_t end) {
  args.parts[0].x.dtype == DType::f32 ? rotate_tokens<float>(args, begin, end) : rotate_tokens<bf16>(args, begin, end);
}

}  // namespace
}  // namespace tilewright
