#include "base/vec/avx2.h"
#include "kernels/gated_delta/generic.h"

namespace tilewright {
extern const GatedDeltaKernels gated_delta_avx2;
const GatedDeltaKernels gated_delta_avx2 = {step, chunk};
}  // namespace tilewright
