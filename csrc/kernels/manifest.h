// How an op picks its kernel: from its levels in CMakeLists.txt, best first, the first that may be used.
//
// From that list CMake writes kernels/lists.h, with the levels of this architecture:
//
//   #define TILEWRIGHT_KERNELS_OF_norm(KERNEL, ...) ... KERNEL(scalar, norm_scalar, __VA_ARGS__)
//   #define TILEWRIGHT_OPS(OP) OP(norm) ...
//
// and everything else follows: which files are compiled with which flags, the tables here, what `tilewright info` and
// Python's tests see, and which levels the C++ tests go through.
#pragma once

#include <cstddef>

#include "base/isa.h"
#include "kernels/lists.h"

namespace tilewright {

template <class Kernels>
struct Entry {
  Isa isa;
  const Kernels* kernels;
};

template <class Kernels, size_t kCount>
const Kernels& select(const Entry<Kernels> (&table)[kCount]) {
  for (const auto& entry : table)
    if (may_use(entry.isa)) return *entry.kernels;
  return *table[kCount - 1].kernels;  // the last one is scalar: it runs anywhere
}

#define TILEWRIGHT_DECLARE(isa, name, Kernels) extern const Kernels name;
#define TILEWRIGHT_ENTRY(isa, name, Kernels) {Isa::isa, &name},

// kTable, an op's kernels of type `Kernels`, best first.
#define TILEWRIGHT_TABLE(op, Kernels)                                                                  \
  TILEWRIGHT_KERNELS_OF_##op(TILEWRIGHT_DECLARE, Kernels) static constexpr Entry<Kernels> kTable[] = { \
      TILEWRIGHT_KERNELS_OF_##op(TILEWRIGHT_ENTRY, Kernels)};

struct KernelInfo {
  Isa isa;
  const char* name;
};

struct OpInfo {
  const char* op;
  const KernelInfo* kernels;  // best first
  int num_kernels;
};

// Every op with its kernels.
const OpInfo* all_ops(int* count);

}  // namespace tilewright
