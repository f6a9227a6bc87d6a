#include "base/vec/avx2.h"
#include "kernels/image/bytes_avx2.h"
#include "kernels/image/generic.h"

namespace tilewright {
extern const ImageKernels image_avx2;
const ImageKernels image_avx2 = {resize_bands, patch_bands, Bytes::kCount};
}  // namespace tilewright
