#include "kernels/level.h"

#include TILEWRIGHT_VEC

#include "kernels/conv3d/generic.h"

namespace tilewright {
TILEWRIGHT_KERNELS(conv3d, Conv3dKernels) = {kDotProduct.text, conv3d_element_bytes, conv3d_run<>};
}  // namespace tilewright
