#include "base/vec/scalar.h"

#include "kernels/probe/generic.h"

namespace tilewright {
extern const ProbeKernels probe_scalar;
const ProbeKernels probe_scalar = {sum_values, multiply_fp32, multiply_fp32, multiply_fp32};
}  // namespace tilewright
