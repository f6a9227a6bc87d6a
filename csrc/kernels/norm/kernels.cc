#include "kernels/level.h"

#include TILEWRIGHT_VEC

#include "kernels/norm/generic.h"

namespace tilewright {
TILEWRIGHT_KERNELS(norm, NormKernels) = {rms_norm_rows, layer_norm_rows};
}  // namespace tilewright
