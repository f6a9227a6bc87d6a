// Causal depthwise convolution over time, and silu:
//
//   y[t, c] = silu(bias[c] + sum_i weight[i, c] x[t - W + 1 + i, c])       i = 0 .. W - 1, sums in fp32
//
// x [T, C] holds packed sequences; before a sequence's first token come the last W - 1 inputs it had, which are its
// state [W - 1, C], oldest first, in a pool of slots (base/sequences.h).
#pragma once

#include <cstdint>

#include "base/rows.h"
#include "base/sequences.h"

namespace tilewright {

struct ConvArgs {
  Rows x, y;           // [T, C] of one type; y is not x: a token's input is read for the tokens after it too
  const void* weight;  // [W, C]
  const void* bias;    // [C] or null, of the weight's type
  DType weight_dtype;
  Rows states;  // slots of [W - 1, C]: empty if W is 1
  Sequences sequences;
  int64_t channels;
  int width;
};

void causal_conv(const ConvArgs& args);

// Some tokens of one sequence and some channels.
struct ConvPiece {
  int32_t sequence;
  int32_t token_begin, token_end;
  int32_t channel_begin, channel_end;
};

struct ConvKernels {
  void (*convolve)(const ConvArgs& args, const ConvPiece& piece);
  // Writes the states to keep of a sequence's tokens, once all of its outputs are computed.
  void (*keep)(const ConvArgs& args, const ConvPiece& piece);
};

}  // namespace tilewright
