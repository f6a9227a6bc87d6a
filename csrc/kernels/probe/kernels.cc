#include "kernels/level.h"

#include TILEWRIGHT_VEC

#include "kernels/probe/generic.h"

#include TILEWRIGHT_LOOPS

namespace tilewright {
TILEWRIGHT_KERNELS(probe, ProbeKernels) = {sum_values, multiply_fp32, multiply_bf16, multiply_int8};
}  // namespace tilewright
