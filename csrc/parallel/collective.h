// Collectives between the processes of one machine, over shared memory (docs/parallel.md).
//
//   all_reduce       out = x_0 + x_1 + ...
//   reduce_scatter   the same, of which a rank gets its part
//   all_gather       x of all ranks, side by side
//   broadcast        x of the root
//   all_reduce_add   out = residual + (x_0 + x_1 + ...)
//   all_reduce_norm  residual += x_0 + x_1 + ...; out = rms_norm(residual)
//
// Sums are made in fp32, in the order of ranks, and rounded once: results do not depend on timing, nor on how a message
// is cut, and have the same bits on all ranks.
//
// Each call takes a plain struct, as kernels do, so that a step with collectives in it can be recorded and replayed.
// All ranks make the same calls in the same order.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/rows.h"
#include "parallel/group.h"

namespace tilewright {

struct AllReduceArgs {
  SharedGroup* group = nullptr;
  const void* x = nullptr;
  void* out = nullptr;  // may be x
  int64_t count = 0;
  DType dtype = DType::f32;  // f32 or bf16
};

struct ReduceScatterArgs {
  SharedGroup* group = nullptr;
  const void* x = nullptr;  // [size, count]
  void* out = nullptr;      // [count]; may be this rank's part of x
  int64_t count = 0;
  DType dtype = DType::f32;  // f32 or bf16
};

struct AllGatherArgs {
  SharedGroup* group = nullptr;
  Rows x;    // [rows, width]
  Rows out;  // [rows, out_width], of the same type; x may be this rank's columns of it
  int64_t rows = 1, width = 0;
  int64_t out_width = 0;  // size * width, or less: the last columns are left out
};

struct BroadcastArgs {
  SharedGroup* group = nullptr;
  void* x = nullptr;  // read on the root, written on the others
  int64_t count = 0;
  int root = 0;
  DType dtype = DType::f32;
};

struct BarrierArgs {
  SharedGroup* group = nullptr;
};

struct AllReduceAddArgs {
  SharedGroup* group = nullptr;
  const void* x = nullptr;
  const void* residual = nullptr;  // the same values on all ranks
  void* out = nullptr;             // may be residual
  int64_t count = 0;
  DType x_dtype = DType::f32, dtype = DType::f32;  // of x; of residual and out: the same, or bf16 for x of f32
};

struct AllReduceNormArgs {
  SharedGroup* group = nullptr;
  const void* x = nullptr;   // [rows, width]
  void* residual = nullptr;  // the same shape and the same values on all ranks; updated
  void* out = nullptr;       // may be x
  const void* weight = nullptr;
  int64_t rows = 0, width = 0;  // width: at most max_norm_width
  float eps = 0;
  bool weight_plus_one = false;
  DType x_dtype = DType::f32, dtype = DType::f32;  // of x; of residual and out, as above
  DType weight_dtype = DType::f32;
};

// Copies the rows that a group of one rank gathers; the last columns of x are left out if out is narrower.
struct CopyRowsArgs {
  Rows x, out;
  int64_t rows = 0, width = 0;
};

// The widest row of x that a slot of the group can hold.
int64_t max_norm_width(const SharedGroup& group, DType x_dtype);

void all_reduce(const AllReduceArgs& args);
void reduce_scatter(const ReduceScatterArgs& args);
void all_gather(const AllGatherArgs& args);
void broadcast(const BroadcastArgs& args);
void barrier(const BarrierArgs& args);
void all_reduce_add(const AllReduceAddArgs& args);
void all_reduce_norm(const AllReduceNormArgs& args);
void copy_rows(const CopyRowsArgs& args);

}  // namespace tilewright
