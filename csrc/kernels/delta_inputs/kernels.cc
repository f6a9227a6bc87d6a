#include "kernels/level.h"

#include TILEWRIGHT_VEC

#include "kernels/delta_inputs/generic.h"

namespace tilewright {
TILEWRIGHT_KERNELS(delta_inputs, DeltaInputsKernels) = {gates};
}  // namespace tilewright
