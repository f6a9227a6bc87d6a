#include "base/vec/scalar.h"
#include "kernels/norm/generic.h"

namespace tilewright {
extern const NormKernels norm_scalar;
const NormKernels norm_scalar = {rms_norm_rows, layer_norm_rows};
}  // namespace tilewright
