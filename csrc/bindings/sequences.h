// Packed sequences with states in a pool, as the ops that carry a state take them.
#pragma once

#include <string>

#include "base/sequences.h"
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
  const int32_t* s = sequences.starts;
  OP_REQUIRE(op, s[0] == 0, "starts[0] is " + text(s[0]) + ", expected 0");
  for (int64_t b = 0; b < op["B"]; ++b)
    OP_REQUIRE(op, s[b] <= s[b + 1],
               "starts must not decrease, but [" + text(b) + "] is " + text(s[b]) + " and [" + text(b + 1) + "] is " +
                   text(s[b + 1]));
  OP_REQUIRE(op, s[op["B"]] == num_tokens,
             "starts[-1] is " + text(s[op["B"]]) + ", expected the " + text(num_tokens) + " tokens");
  auto check_slots = [&](const Tensor& slots) {
    const int32_t* slot = slots.as<int32_t>();
    for (int64_t i = 0; i < slots.size(0); ++i)
      OP_REQUIRE(op, slot[i] < num_slots,
                 std::string(slots.name) + "[" + text(i) + "] is " + text(slot[i]) + ", the pool has " +
                     text(num_slots) + " slots");
  };
  check_slots(read);
  if (write) check_slots(write);
  return sequences;
}

}  // namespace tilewright
