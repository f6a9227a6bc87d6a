#include "base/vec/avx2.h"
#include "kernels/norm/generic.h"

namespace tilewright {
extern const NormKernels norm_avx2;
const NormKernels norm_avx2 = {rms_norm_rows, layer_norm_rows};
}  // namespace tilewright
