#include "base/vec/avx2.h"
#include "kernels/delta_inputs/generic.h"

namespace tilewright {
extern const DeltaInputsKernels delta_inputs_avx2;
const DeltaInputsKernels delta_inputs_avx2 = {gates};
}  // namespace tilewright
