#include "kernels/level.h"

#include TILEWRIGHT_VEC

#include "kernels/gated_delta/generic.h"

namespace tilewright {
TILEWRIGHT_KERNELS(gated_delta, GatedDeltaKernels) = {VectorMatrix::kProduct.text, step, chunk};
}  // namespace tilewright
