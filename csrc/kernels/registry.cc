#include "kernels/manifest.h"

namespace tilewright {
namespace {

#define KERNEL(isa, name) {Isa::isa, #name},
constexpr KernelInfo kAttention[] = {
#include "kernels/attention/kernels.inc"
};
constexpr KernelInfo kKvCache[] = {
#include "kernels/kv_cache/kernels.inc"
};
constexpr KernelInfo kLinear[] = {
#include "kernels/linear/kernels.inc"
};
constexpr KernelInfo kMoe[] = {
#include "kernels/moe/kernels.inc"
};
constexpr KernelInfo kGatedDelta[] = {
#include "kernels/gated_delta/kernels.inc"
};
constexpr KernelInfo kDeltaInputs[] = {
#include "kernels/delta_inputs/kernels.inc"
};
constexpr KernelInfo kConv[] = {
#include "kernels/conv/kernels.inc"
};
constexpr KernelInfo kNorm[] = {
#include "kernels/norm/kernels.inc"
};
constexpr KernelInfo kActivation[] = {
#include "kernels/activation/kernels.inc"
};
constexpr KernelInfo kEmbedding[] = {
#include "kernels/embedding/kernels.inc"
};
constexpr KernelInfo kRope[] = {
#include "kernels/rope/kernels.inc"
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
    op("attention", kAttention),
    op("kv_cache", kKvCache),
    op("linear", kLinear),
    op("moe", kMoe),
    op("gated_delta", kGatedDelta),
    op("delta_inputs", kDeltaInputs),
    op("conv", kConv),
    op("norm", kNorm),
    op("activation", kActivation),
    op("embedding", kEmbedding),
    op("rope", kRope),
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
