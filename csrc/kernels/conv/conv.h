// Causal convolution over time, each channel by itself, and silu:
//
//   y[t, c] = silu(bias[c] + sum_i weight[i, c] x[t - W + 1 + i, c])       i = 0 .. W - 1, sums in fp32
//
// x [T, C] holds packed sequences; before a sequence's first token come the last W - 1 inputs it had, which are its
// state [W - 1, C], oldest first, in a pool of slots. A state is read from read_slots[b] (negative: zeros), and the
// state after a token is written to write_slots[token] (negative: not kept); without write_slots the state after the
// last token goes back to where it was read. A slot that is written must not be read or written by another sequence.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/tile.h"

namespace tilewright {

struct ConvArgs {
  const void* x;
  int64_t x_stride;  // elements from token to token
  void* y;           // not x: a token's input is read for the tokens after it too
  int64_t y_stride;
  DType dtype;         // of x, y
  const void* weight;  // [W, C]
  const void* bias;    // [C] or null, of the weight's type
  DType weight_dtype;
  void* states;  // [slots, W - 1, C]: nothing where W is 1
  int64_t slot_stride;
  DType state_dtype;
  const int32_t* starts;       // [B + 1]
  const int32_t* read_slots;   // [B]
  const int32_t* write_slots;  // [T], or null
  int64_t num_sequences, channels;
  int width;

  TILEWRIGHT_INLINE int64_t write_slot(int64_t sequence, int64_t token) const {
    if (write_slots) return write_slots[token];
    return token + 1 == starts[sequence + 1] ? read_slots[sequence] : -1;
  }
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
  // Writes the states that are kept of a sequence's tokens, once all of its outputs are made.
  void (*keep)(const ConvArgs& args, const ConvPiece& piece);
};

}  // namespace tilewright
