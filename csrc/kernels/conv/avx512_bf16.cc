#include "base/vec/avx512.h"
#include "kernels/conv/generic.h"

namespace tilewright {
extern const ConvKernels conv_avx512_bf16;
const ConvKernels conv_avx512_bf16 = {convolve, keep};
}  // namespace tilewright
