#include "base/vec/avx2.h"
#include "kernels/activation/generic.h"

namespace tilewright {
extern const ActivationKernels activation_avx2;
const ActivationKernels activation_avx2 = {activate_span, gate_span, add_span, sigmoid_gate_rows};
}  // namespace tilewright
