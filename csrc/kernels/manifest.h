// How an op picks its kernel: kernels/<op>/kernels.inc lists KERNEL(isa, name), best first, and the first entry
// whose level the machine (and the cap) allows is used. The same lists feed `tilewright info`, the tests, the bench.
#pragma once

#include <cstddef>

#include "base/isa.h"

namespace tilewright {

template <class Kernels>
struct Entry {
  Isa isa;
  const Kernels* kernels;
};

template <class Kernels, size_t kCount>
const Kernels& select(const Entry<Kernels> (&table)[kCount]) {
  const Isa active = active_isa();
  for (const auto& entry : table)
    if (entry.isa <= active) return *entry.kernels;
  return *table[kCount - 1].kernels;  // the last one is scalar: it runs anywhere
}

struct KernelInfo {
  Isa isa;
  const char* name;
};

struct OpInfo {
  const char* op;
  const KernelInfo* kernels;  // best first
  int num_kernels;
};

// Every op with its manifest.
const OpInfo* all_ops(int* count);

}  // namespace tilewright
