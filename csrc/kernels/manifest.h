// Selection of an op's kernel: the first of its levels in CMakeLists.txt, best first, that may be used.
//
// From that list CMake compiles the op's files once per level with its flags, builds its C++ test, and writes the
// levels of this architecture to kernels/lists.h, or those that TILEWRIGHT_LEVELS asks for:
//
//   #define TILEWRIGHT_KERNELS_OF_norm(KERNEL, ...) ... KERNEL(scalar, norm_scalar, __VA_ARGS__)
//   #define TILEWRIGHT_OPS(OP) OP(norm) ...
//
// The tables here and the output of `tilewright info` (registry.cc) are made from it. Tests do not read the list: in
// C++ and in Python they iterate over the levels of the machine and cap the kernels at each, so that every listed
// kernel that can run here is run.
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

// Whether a table is ordered as `select` assumes: best first, and scalar last, which runs anywhere.
template <class Kernels, size_t kCount>
consteval bool is_ordered(const Entry<Kernels> (&table)[kCount]) {
  for (size_t i = 1; i < kCount; ++i)
    if (table[i].isa <= table[i - 1].isa) return false;
  return table[kCount - 1].isa == Isa::scalar;
}

template <class Kernels, size_t kCount>
const Kernels& select(const Entry<Kernels> (&table)[kCount]) {
  for (const auto& entry : table)
    if (may_use(entry.isa)) return *entry.kernels;
  return *table[kCount - 1].kernels;
}

struct KernelInfo {
  Isa isa;
  const char* product;  // what it multiplies, as its table says it; null: no matrices
};

struct OpInfo {
  const char* op;
  int num_kernels;
  KernelInfo kernels[kNumIsaLevels];  // best first
};

template <class Kernels, size_t kCount>
OpInfo info_of(const char* op, const Entry<Kernels> (&table)[kCount]) {
  OpInfo info = {op, 0, {}};
  for (const auto& entry : table) {
    const char* product = nullptr;
    if constexpr (requires { entry.kernels->product; }) product = entry.kernels->product;
    info.kernels[info.num_kernels++] = {entry.isa, product};
  }
  return info;
}

#define TILEWRIGHT_DECLARE(isa, name, Kernels) extern const Kernels name;
#define TILEWRIGHT_ENTRY(isa, name, Kernels) {Isa::isa, &name},

// kTable, an op's kernels of type `Kernels`, best first, and what registry.cc asks for.
#define TILEWRIGHT_TABLE(op, Kernels)                                                                         \
  TILEWRIGHT_KERNELS_OF_##op(TILEWRIGHT_DECLARE, Kernels) static constexpr Entry<Kernels> kTable[] = {        \
      TILEWRIGHT_KERNELS_OF_##op(TILEWRIGHT_ENTRY, Kernels)};                                                 \
  static_assert(is_ordered(kTable), "CMakeLists.txt lists the levels of " #op " best first, down to scalar"); \
  OpInfo info_of_##op() { return info_of(#op, kTable); }

// Every op with its kernels (registry.cc).
const OpInfo* all_ops(int* count);

}  // namespace tilewright
