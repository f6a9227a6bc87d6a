// The gated delta rule: linear attention whose state decays and corrects itself. For each token of a sequence and each
// value head, with S [K, V] in fp32:
//
//   S = exp(g) S                          g <= 0: the decay
//   S = S + k (beta (v - S^T k))^T        what S returns for k moves towards v by beta
//   out = scale S^T q
//
// With `normalize`, q and k are used as x / sqrt(sum(x^2) + eps). Value head h reads key head h / (H / G).
//
// Up to kStepTokens tokens are processed one by one, the state passing through the caches once for all of them. More
// are processed in chunks of kChunkTokens: with e_i = exp(g_1 + .. + g_i) within the chunk and L_ij = beta_i (k_i .
// k_j) e_i / e_j for j < i,
//
//   U   = (I + L)^-1 beta (V - e K S)                     what the chunk adds to the state, token by token
//   out = scale (e Q S + P U)                             P_ij = (q_i . k_j) e_i / e_j for j <= i
//   S   = e_C S + K^T (e_C / e_i) U
//
// The products run on tiles of bf16 if the level has them. bf16 q and k enter them unchanged and their lengths are
// divided out in fp32; S, U, P and the inverse enter as the sum of two bf16, 16 bits of mantissa. With fp32 inputs all
// of them enter as the sum of three, 24 bits. Decays, the inverse, the state and all sums are fp32.
//
// States lie in a pool of slots (base/sequences.h).
#pragma once

#include <cstdint>

#include "base/rows.h"
#include "base/sequences.h"
#include "base/tile.h"

namespace tilewright {

struct GatedDeltaArgs {
  Heads q, k;     // [T, G, K], all four of one type
  Heads v, out;   // [T, H, V]
  Rows g, beta;   // [T, H] fp32
  float* states;  // [slots, H, K, V]
  int64_t slot_stride;
  Sequences sequences;
  int64_t key_heads, value_heads, key_width, value_width;
  float scale, eps;
  bool normalize;

  TILEWRIGHT_INLINE int64_t group() const { return value_heads / key_heads; }
  // Returns the state of a head, or null for a negative slot.
  TILEWRIGHT_INLINE float* state(int64_t slot, int64_t head) const {
    return slot < 0 ? nullptr : states + slot * slot_stride + head * key_width * value_width;
  }
};

void gated_delta_rule(const GatedDeltaArgs& args);

inline constexpr int kChunkTokens = 64;
inline constexpr int kStepTokens = 12;

// A unit of work: value heads of one key head and columns of their states, through a whole sequence.
struct DeltaItem {
  int32_t sequence;
  int32_t head_begin, head_end;      // value heads
  int32_t column_begin, column_end;  // begins at a multiple of kStripColumns
};

struct GatedDeltaKernels {
  const char* product;  // of a chunk, for the kernel's name (base/product_name.h)
  // Token by token; heads of any key heads, all columns.
  void (*step)(const GatedDeltaArgs& args, const DeltaItem& item);
  void (*chunk)(const GatedDeltaArgs& args, const DeltaItem& item);
};

}  // namespace tilewright
