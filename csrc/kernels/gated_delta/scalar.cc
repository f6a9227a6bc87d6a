#include "base/vec/scalar.h"
#include "kernels/gated_delta/generic.h"

namespace tilewright {
extern const GatedDeltaKernels gated_delta_scalar;
const GatedDeltaKernels gated_delta_scalar = {step, chunk};
}  // namespace tilewright
