#include "base/vec/scalar.h"
#include "kernels/image/bytes_scalar.h"
#include "kernels/image/generic.h"

namespace tilewright {
extern const ImageKernels image_scalar;
const ImageKernels image_scalar = {resize_bands, patch_bands, Bytes::kCount};
}  // namespace tilewright
