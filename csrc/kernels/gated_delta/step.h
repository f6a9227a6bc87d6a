// The gated delta rule token by token. Include after a Vec.
//
// A block of columns makes two passes over its part of the state, the second from L1: S^T k and S^T q, which give the
// change and the output (S'^T q = e S^T q + (k . q) change), then the update. The update of a token also computes S^T k
// and S^T q of the next one.
#pragma once

#include <cmath>
#include <type_traits>

#include "base/arch.h"
#include "base/scratch.h"
#include "base/vec/math.h"
#include "base/vec/row.h"
#include "kernels/gated_delta/gated_delta.h"

namespace tilewright {
namespace {

// Returns the factor that normalises a row, given the sum of its squares.
inline float unit_factor(const GatedDeltaArgs& args, float squares) {
  return args.normalize ? 1.0f / std::sqrt(squares + args.eps) : 1.0f;
}

// q and k of a sequence's tokens for one key head.
struct StepTokens {
  int64_t begin, count;
  float *q, *k;  // [count, K]: of length 1, q scaled
  float* dots;   // [count]: q . k
};

template <class T>
void load_tokens(const GatedDeltaArgs& args, int64_t key_head, StepTokens& tokens) {
  for (int64_t t = 0; t < tokens.count; ++t) {
    const int64_t token = tokens.begin + t;
    const T* q = args.q.row<T>(token, key_head);
    const T* k = args.k.row<T>(token, key_head);
    const Vec q_factor = Vec::set1(unit_factor(args, sum_of_squares(q, args.key_width)) * args.scale);
    const Vec k_factor = Vec::set1(unit_factor(args, sum_of_squares(k, args.key_width)));
    float *q_out = tokens.q + t * args.key_width, *k_out = tokens.k + t * args.key_width;
    tokens.dots[t] = accumulate(args.key_width, [&](Vec sum, int64_t i, auto count) {
      const Vec q_unit = load_some(q + i, count) * q_factor, k_unit = load_some(k + i, count) * k_factor;
      store_some(q_unit, q_out + i, count);
      store_some(k_unit, k_out + i, count);
      return fma(q_unit, k_unit, sum);
    });
  }
}

// 4 Vecs of columns: 8 sums hide the latency of the additions, and 128 rows of them are 32 KB, in L1.
inline constexpr int kStepVecs = 4;
inline constexpr int kStepColumns = kStepVecs * Vec::kLanes;

// One block of columns of one head's state: kVecs Vecs, the last of which has `count` lanes.
template <int kVecs, class Count>
struct StepBlock {
  int64_t rows;
  Count count;
  const float* next;  // what is read after this block, prefetched a row at a time
  int64_t next_stride;
  Vec by_k[kVecs], by_q[kVecs];  // S^T k, S^T q

  Vec load(const float* row, int v) const { return load_some(row + v * Vec::kLanes, count); }

  void clear() {
    for (int v = 0; v < kVecs; ++v) by_k[v] = by_q[v] = Vec::zero();
  }

  void read(const float* state, int64_t stride, const float* k, const float* q) {
    for (int64_t d = 0; d < rows; ++d) {
      const Vec k_d = Vec::set1(k[d]), q_d = Vec::set1(q[d]);
      for (int line = 0; line < kVecs; line += 2) prefetch(next + d * next_stride + line * Vec::kLanes);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const Vec s = load(state + d * stride, v);
        by_k[v] = fma(k_d, s, by_k[v]);
        by_q[v] = fma(q_d, s, by_q[v]);
      }
    }
  }

  // target = decay source + k change^T; with kNext, also the next token's S^T k and S^T q.
  template <bool kZero, bool kNext>
  void update(const float* source, int64_t source_stride, float* target, int64_t target_stride, Vec decay,
              const float* k, const Vec (&change)[kVecs], const float* next_k, const float* next_q) {
    for (int64_t d = 0; d < rows; ++d) {
      const Vec k_d = Vec::set1(k[d]);
      for (int line = 1; line < kVecs; line += 2) prefetch(next + d * next_stride + line * Vec::kLanes);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        Vec s = k_d * change[v];
        if constexpr (!kZero) s = fma(decay, load(source + d * source_stride, v), s);
        store_some(s, target + d * target_stride + v * Vec::kLanes, count);
        if constexpr (kNext) {
          by_k[v] = fma(Vec::set1(next_k[d]), s, by_k[v]);
          by_q[v] = fma(Vec::set1(next_q[d]), s, by_q[v]);
        }
      }
    }
  }
};

// `work` holds the block between tokens whose state is not kept.
template <class T, int kVecs, class Count>
void step_block(const GatedDeltaArgs& args, int64_t sequence, int64_t head, const StepTokens& tokens, int64_t column,
                Count count, const float* next, float* work) {
  StepBlock<kVecs, Count> block{args.key_width, count, next, args.value_width, {}, {}};
  const float* source = args.state(args.sequences.read_slots[sequence], head);
  if (source) source += column;
  int64_t source_stride = args.value_width;
  block.clear();
  if (source) block.read(source, source_stride, tokens.k, tokens.q);
  for (int64_t t = 0; t < tokens.count; ++t) {
    const int64_t token = tokens.begin + t;
    const T* v_row = args.v.row<T>(token, head) + column;
    T* out = args.out.row<T>(token, head) + column;
    const Vec decay = exp(Vec::set1(args.g.row<float>(token)[head]));
    const Vec beta = Vec::set1(args.beta.row<float>(token)[head]), dot = Vec::set1(tokens.dots[t]);
    Vec change[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      change[v] = beta * (load_some(v_row + v * Vec::kLanes, count) - decay * block.by_k[v]);
      store_some(fma(dot, change[v], decay * block.by_q[v]), out + v * Vec::kLanes, count);
    }
    const bool last = t + 1 == tokens.count;
    float* kept = args.state(args.sequences.write_slot(sequence, token), head);
    if (last && !kept) return;
    float* target = kept ? kept + column : work;
    const int64_t target_stride = kept ? args.value_width : kStepColumns;
    const float *k = tokens.k + t * args.key_width, *next_k = k + args.key_width;
    const float* next_q = tokens.q + (t + 1) * args.key_width;
    block.clear();
    auto update = [&](auto zero, auto more) {
      block.template update<zero.value, more.value>(source, source_stride, target, target_stride, decay, k, change,
                                                    next_k, next_q);
    };
    if (last)
      source ? update(std::false_type{}, std::false_type{}) : update(std::true_type{}, std::false_type{});
    else
      source ? update(std::false_type{}, std::true_type{}) : update(std::true_type{}, std::true_type{});
    source = target;
    source_stride = target_stride;
  }
}

template <class T>
void step_head(const GatedDeltaArgs& args, int64_t sequence, int64_t head, bool more_heads, const StepTokens& tokens,
               float* work) {
  const float* state = args.state(args.sequences.read_slots[sequence], head);
  for (int64_t column = 0; column < args.value_width;) {
    const int64_t left = args.value_width - column;
    const float* next = work;
    if (state && left > kStepColumns)
      next = state + column + kStepColumns;
    else if (state && more_heads)
      next = state + args.key_width * args.value_width;
    constexpr std::integral_constant<int, Vec::kLanes> kWhole{};
    if (left >= kStepColumns) {
      step_block<T, kStepVecs>(args, sequence, head, tokens, column, kWhole, next, work);
      column += kStepColumns;
    } else if (left >= Vec::kLanes) {
      step_block<T, 1>(args, sequence, head, tokens, column, kWhole, next, work);
      column += Vec::kLanes;
    } else {
      step_block<T, 1>(args, sequence, head, tokens, column, left, next, work);
      column = args.value_width;
    }
  }
}

template <class T>
void step_as(const GatedDeltaArgs& args, const DeltaItem& item) {
  const int64_t count = args.sequences.num_tokens(item.sequence), width = args.key_width;
  float* scratch =
      static_cast<float*>(thread_scratch(((2 * width + 1) * count + width * kStepColumns) * sizeof(float)));
  float* work = scratch;
  StepTokens tokens = {args.sequences.starts[item.sequence], count, work + width * kStepColumns, nullptr, nullptr};
  tokens.k = tokens.q + count * width;
  tokens.dots = tokens.k + count * width;
  for (int64_t head = item.head_begin; head < item.head_end; ++head) {
    if (head == item.head_begin || head % args.group() == 0) load_tokens<T>(args, head / args.group(), tokens);
    step_head<T>(args, item.sequence, head, head + 1 < item.head_end, tokens, work);
  }
}

void step(const GatedDeltaArgs& args, const DeltaItem& item) {
  const FlushDenormals flush;
  args.q.dtype == DType::bf16 ? step_as<bf16>(args, item) : step_as<float>(args, item);
}

}  // namespace
}  // namespace tilewright
