#include "base/vec/avx512.h"
#include "kernels/activation/generic.h"

namespace tilewright {
extern const ActivationKernels activation_avx512;
const ActivationKernels activation_avx512 = {activate_span, gate_span, add_span, sigmoid_gate_rows};
}  // namespace tilewright
