#include "base/vec/avx512.h"
#include "kernels/delta_inputs/generic.h"

namespace tilewright {
extern const DeltaInputsKernels delta_inputs_avx512;
const DeltaInputsKernels delta_inputs_avx512 = {gates};
}  // namespace tilewright
