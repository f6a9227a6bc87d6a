#include "kernels/level.h"

#include TILEWRIGHT_VEC

#include "kernels/ada_norm/generic.h"

namespace tilewright {
TILEWRIGHT_KERNELS(ada_norm, AdaNormKernels) = {ada_norm_rows, gated_add_rows};
}  // namespace tilewright
