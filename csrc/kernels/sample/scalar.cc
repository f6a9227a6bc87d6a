#include "base/vec/scalar.h"
#include "kernels/sample/compare_scalar.h"
#include "kernels/sample/generic.h"

namespace tilewright {
extern const SampleKernels sample_scalar;
const SampleKernels sample_scalar = {sample_rows, probability_rows, log_prob_rows, mask_values};
}  // namespace tilewright
