// Reads packed sequences with states in a pool.
#pragma once

#include <string>

#include "base/sequences.h"
#include "bindings/checks.h"
#include "bindings/tensor.h"

namespace tilewright {

// starts [B + 1], read_slots [B] and write_slots [T] or none, int32; slots below `num_slots`.
inline Sequences sequences_of(Op& op, nb::handle starts_arg, nb::handle read_arg, nb::handle write_arg,
                              int64_t num_tokens, int64_t num_slots) {
  constexpr DTypes kInt32 = one_of({DType::i32});
  auto text = [](int64_t value) { return std::to_string(value); };
  const Tensor read = op.tensor(read_arg, "read_slots", {"B"}, kInt32);
  const Tensor starts = op.tensor(starts_arg, "starts", {"_"}, kInt32);
  const Tensor write = op.optional(write_arg, "write_slots", {"T"}, kInt32);
  const Sequences sequences = {starts.as<int32_t>(), read.as<int32_t>(), write.as<int32_t>(), op["B"]};
  OP_REQUIRE(op, starts.size(0) == op["B"] + 1,
             "starts has " + text(starts.size(0)) + " entries, expected " + text(op["B"] + 1));
  require_of_inputs(Starts{op.name(), starts.name, "the call", sequences.starts, sequences.count, num_tokens});
  for (const Tensor* slots : {&read, &write})
    if (*slots)
      require_of_inputs(Slots{op.name(), slots->name, "pool", slots->data, slots->dtype, slots->size(0), num_slots});
  return sequences;
}

}  // namespace tilewright
