#include "kernels/level.h"

#include TILEWRIGHT_VEC

#include "kernels/conv/generic.h"

namespace tilewright {
TILEWRIGHT_KERNELS(conv, ConvKernels) = {convolve, keep};
}  // namespace tilewright
