#include "kernels/level.h"

#include TILEWRIGHT_VEC
#include TILEWRIGHT_BYTES

#include "kernels/image/generic.h"

namespace tilewright {
TILEWRIGHT_KERNELS(image, ImageKernels) = {resize_bands, patch_bands, Bytes::kCount};
}  // namespace tilewright
