#include "base/vec/avx512.h"
#include "kernels/norm/generic.h"

namespace tilewright {
extern const NormKernels norm_avx512;
const NormKernels norm_avx512 = {rms_norm_rows, layer_norm_rows};
}  // namespace tilewright
