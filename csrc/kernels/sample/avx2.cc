#include "base/vec/avx2.h"
#include "kernels/sample/compare_avx2.h"
#include "kernels/sample/generic.h"

namespace tilewright {
extern const SampleKernels sample_avx2;
const SampleKernels sample_avx2 = {sample_rows, probability_rows, log_prob_rows, mask_values};
}  // namespace tilewright
