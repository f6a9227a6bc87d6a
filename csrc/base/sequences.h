// Packed sequences whose states lie in a pool of slots.
//
// A sequence's state is read from read_slots[b] (negative: zeros), and the state after a token is written to
// write_slots[token] (negative: not written); without write_slots the state after the last token is written back to
// read_slots[b]. A slot that is written must not be read or written by another sequence of the call.
#pragma once

#include <cstdint>

#include "base/tile.h"

namespace tilewright {

struct Sequences {
  const int32_t* starts = nullptr;       // [B + 1]
  const int32_t* read_slots = nullptr;   // [B]
  const int32_t* write_slots = nullptr;  // [T], or null
  int64_t count = 0;                     // B

  TILEWRIGHT_INLINE int64_t num_tokens(int64_t sequence) const { return starts[sequence + 1] - starts[sequence]; }
  // Returns the slot for the state after a token.
  TILEWRIGHT_INLINE int64_t write_slot(int64_t sequence, int64_t token) const {
    if (write_slots) return write_slots[token];
    return token + 1 == starts[sequence + 1] ? read_slots[sequence] : -1;
  }
};

}  // namespace tilewright
