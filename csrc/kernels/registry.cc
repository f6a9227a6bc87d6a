#include "kernels/manifest.h"

namespace tilewright {
namespace {

#define KERNEL(isa, name, ...) {Isa::isa, #name},
#define OP(op) constexpr KernelInfo k_##op[] = {TILEWRIGHT_KERNELS_OF_##op(KERNEL)};
TILEWRIGHT_OPS(OP)
#undef OP
#undef KERNEL

constexpr OpInfo kOps[] = {
#define OP(op) {#op, k_##op, static_cast<int>(sizeof(k_##op) / sizeof(KernelInfo))},
    TILEWRIGHT_OPS(OP)
#undef OP
};

}  // namespace

const OpInfo* all_ops(int* count) {
  *count = static_cast<int>(sizeof(kOps) / sizeof(kOps[0]));
  return kOps;
}

}  // namespace tilewright
