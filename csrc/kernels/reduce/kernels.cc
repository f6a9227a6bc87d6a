#include "kernels/level.h"

#include TILEWRIGHT_VEC

#include "kernels/reduce/generic.h"

namespace tilewright {
TILEWRIGHT_KERNELS(reduce, ReduceKernels) = {reduce_elements};
}  // namespace tilewright
