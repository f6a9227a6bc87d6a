#include "kernels/manifest.h"

namespace tilewright {
namespace {

#define KERNEL(isa, name) {Isa::isa, #name},
constexpr KernelInfo kNorm[] = {
#include "kernels/norm/kernels.inc"
};
constexpr KernelInfo kProbe[] = {
#include "kernels/probe/kernels.inc"
};
constexpr KernelInfo kImage[] = {
#include "kernels/image/kernels.inc"
};
constexpr KernelInfo kSample[] = {
#include "kernels/sample/kernels.inc"
};
#undef KERNEL

template <int kCount>
constexpr OpInfo op(const char* name, const KernelInfo (&kernels)[kCount]) {
  return {name, kernels, kCount};
}

constexpr OpInfo kOps[] = {
    op("norm", kNorm),
    op("probe", kProbe),
    op("image", kImage),
    op("sample", kSample),
};

}  // namespace

const OpInfo* all_ops(int* count) {
  *count = static_cast<int>(sizeof(kOps) / sizeof(kOps[0]));
  return kOps;
}

}  // namespace tilewright
