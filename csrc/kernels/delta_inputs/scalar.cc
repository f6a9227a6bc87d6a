#include "base/vec/scalar.h"
#include "kernels/delta_inputs/generic.h"

namespace tilewright {
extern const DeltaInputsKernels delta_inputs_scalar;
const DeltaInputsKernels delta_inputs_scalar = {gates};
}  // namespace tilewright
