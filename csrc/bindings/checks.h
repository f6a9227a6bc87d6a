// Checks of the numbers that select rows, slots and pages: a wrong one would access wild memory. A recorded call finds
// other numbers in the same memory at each replay, so its checks are recorded beside it (bindings/plan.h). They are
// plain structs, like the arguments of kernels; `run` raises ValueError "<op>: <what>". A replay of 8 sequences with
// 4,096 tokens each takes 0.3 us longer for them, 1.3 us with 48 layers of experts.
#pragma once

#include <cstdint>

#include "bindings/tensor.h"
#include "kernels/attention/attention.h"

namespace tilewright {

// Ids [count], or a matrix of `columns` columns: each in [0, limit).
struct Ids {
  const char *op, *name;
  const void* data;
  DType dtype;  // int32 or int64
  int64_t count, limit;
  int64_t columns = 0;

  bool operator==(const Ids&) const = default;
  void run() const;
};

// Slots [count] below `limit`, the number of slots of `holder` ("cache", "pool"). A negative one is none.
struct Slots {
  const char *op, *name, *holder;
  const void* data;
  DType dtype;
  int64_t count, limit;

  bool operator==(const Slots&) const = default;
  void run() const;
};

// Starts of sequences among `num_tokens` tokens of `of_what`: [num_sequences + 1], rising from 0 to num_tokens.
struct Starts {
  const char *op, *name, *of_what;
  const int32_t* data;
  int64_t num_sequences, num_tokens;

  bool operator==(const Starts&) const = default;
  void run() const;
};

// Every page that a query of a sequence may read is in the cache, and its keys are in the table's pages.
struct Pages {
  const char* op;
  const int32_t *block_table, *query_starts, *kv_lengths;
  int64_t num_sequences, table_stride, table_width, num_pages, page_size, window;
  bool causal;

  bool operator==(const Pages&) const = default;
  void run() const;
};

// Checks the inputs of a step, now and at the start of each replay: the layers of a model share them, and they are
// checked once.
template <class Check>
void require_of_inputs(const Check& check) {
  check.run();
  if (Plan* plan = Plan::recording()) plan->check_at_start(check);
}

// Checks numbers that earlier calls of a step may compute, now and at the call's place in each replay.
template <class Check>
void require_of_results(const Check& check) {
  check.run();
  if (Plan* plan = Plan::recording()) plan->check_in_place(check);
}

}  // namespace tilewright
