// The sum of vectors of one length, as in a reduction over ranks (csrc/parallel).
//
//   out[i] = (((x_0[i] + x_1[i]) + x_2[i]) + ...) + addend[i]
//
// In fp32 and always in this order, with one rounding at the store: the bits depend neither on who computes them nor on
// how the vector is cut.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace tilewright {

inline constexpr int kMaxSummands = 32;

struct ReduceArgs {
  const void* x[kMaxSummands] = {};
  int num_summands = 0;                            // at least 1
  const void* addend = nullptr;                    // optional, added last
  void* out = nullptr;                             // may be one of the inputs of its type
  void* copy = nullptr;                            // optional: the same result a second time
  int64_t count = 0;                               // elements of each
  DType x_dtype = DType::f32, dtype = DType::f32;  // of x; of addend, out and copy: the same, or bf16 for x of f32
};

// Sums all elements, on the threads of the team.
void reduce(const ReduceArgs& args);
// Sums the elements [begin, end), on the calling thread: the caller splits the work.
void reduce_span(const ReduceArgs& args, int64_t begin, int64_t end);

struct ReduceKernels {
  void (*reduce_span)(const ReduceArgs& args, int64_t begin, int64_t end);
};

}  // namespace tilewright
