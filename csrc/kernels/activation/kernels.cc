#include "kernels/level.h"

#include TILEWRIGHT_VEC

#include "kernels/activation/generic.h"

namespace tilewright {
TILEWRIGHT_KERNELS(activation, ActivationKernels) = {activate_span, gate_span, add_span, sigmoid_gate_rows, snake_rows};
}  // namespace tilewright
