#include "base/vec/scalar.h"
#include "kernels/conv/generic.h"

namespace tilewright {
extern const ConvKernels conv_scalar;
const ConvKernels conv_scalar = {convolve, keep};
}  // namespace tilewright
