#include "base/vec/avx2.h"
#include "kernels/conv/generic.h"

namespace tilewright {
extern const ConvKernels conv_avx2;
const ConvKernels conv_avx2 = {convolve, keep};
}  // namespace tilewright
