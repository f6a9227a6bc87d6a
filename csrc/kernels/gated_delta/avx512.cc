#include "base/vec/avx512.h"
#include "kernels/gated_delta/generic.h"

namespace tilewright {
extern const GatedDeltaKernels gated_delta_avx512;
const GatedDeltaKernels gated_delta_avx512 = {step, chunk};
}  // namespace tilewright
