// Copies of rows by number: token embeddings from a table, media embeddings into token rows.
//
//   embedding     out[t] = table[ids[t] - first]   table [V, D], or packed as a linear weight (base/tile.h), quantised
//                                                  or not; zeros where it has no such row
//   scatter_rows  out[rows[m]] = values[m]         or += in fp32, rounded once
//
// Callers check the numbers first with first_out_of_range (and first_repeated for scatter_rows: its rows are written
// by several threads, so a repeated row is an error rather than a race).
#pragma once

#include <cstdint>

#include "base/packed_weight.h"
#include "base/rows.h"

namespace tilewright {

struct EmbeddingArgs {
  const void* ids = nullptr;        // [T]
  DType id_dtype;                   // int32 or int64
  Rows table;                       // [V, D], or
  PackedWeight packed;              // the same table packed, if it has data
  int64_t first = 0, num_rows = 0;  // the ids [first, first + num_rows) are those of the table
  Rows out;                         // [T, D], of the table's type, or either type if it is quantised
  int64_t count = 0, width = 0;
};

struct ScatterArgs {
  const int64_t* rows = nullptr;  // [M], distinct
  Rows values, out;               // [M, D], [T, D], of one type
  int64_t count = 0, width = 0;
  bool accumulate = false;
};

void embedding(const EmbeddingArgs& args);
void scatter_rows(const ScatterArgs& args);

// Returns the index of the first id that is not in [least, limit), or -1.
int64_t first_out_of_range(const void* ids, DType id_dtype, int64_t count, int64_t limit, int64_t least = 0);
// Returns the index of the first of `rows` (all in [0, limit)) that is repeated, or -1.
int64_t first_repeated(const int64_t* rows, int64_t count, int64_t limit);

struct EmbeddingKernels {
  void (*gather)(const EmbeddingArgs& args, int64_t begin, int64_t end);
  void (*gather_packed)(const EmbeddingArgs& args, int64_t begin, int64_t end);
  void (*write)(const ScatterArgs& args, int64_t begin, int64_t end);
  void (*add)(const ScatterArgs& args, int64_t begin, int64_t end);
};

}  // namespace tilewright
