#include "kernels/level.h"

#include TILEWRIGHT_VEC
#include TILEWRIGHT_COMPARE

#include "kernels/sample/generic.h"

namespace tilewright {
TILEWRIGHT_KERNELS(sample, SampleKernels) = {sample_rows, probability_rows, log_prob_rows, mask_values};
}  // namespace tilewright
