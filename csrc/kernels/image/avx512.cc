#include "base/vec/avx512.h"
#include "kernels/image/bytes_avx512.h"
#include "kernels/image/generic.h"

namespace tilewright {
extern const ImageKernels image_avx512;
const ImageKernels image_avx512 = {resize_bands, patch_bands, Bytes::kCount};
}  // namespace tilewright
