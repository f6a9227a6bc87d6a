#include "base/vec/avx512.h"
#include "kernels/sample/compare_avx512.h"
#include "kernels/sample/generic.h"

namespace tilewright {
extern const SampleKernels sample_avx512;
const SampleKernels sample_avx512 = {sample_rows, probability_rows, log_prob_rows, mask_values};
}  // namespace tilewright
