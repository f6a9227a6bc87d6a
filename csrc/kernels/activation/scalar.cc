#include "base/vec/scalar.h"
#include "kernels/activation/generic.h"

namespace tilewright {
extern const ActivationKernels activation_scalar;
const ActivationKernels activation_scalar = {activate_span, gate_span, add_span, sigmoid_gate_rows};
}  // namespace tilewright
