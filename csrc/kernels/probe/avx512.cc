#include "base/vec/avx512.h"

#include "kernels/probe/generic.h"
#include "kernels/probe/int8.h"

namespace tilewright {
extern const ProbeKernels probe_avx512;
const ProbeKernels probe_avx512 = {sum_values, multiply_fp32, multiply_fp32, multiply_int8};
}  // namespace tilewright
