#include "kernels/level.h"

#include TILEWRIGHT_VEC

#include "kernels/rope/generic.h"

namespace tilewright {
TILEWRIGHT_KERNELS(rope, RopeKernels) = {rope_table_tokens, rope_tokens};
}  // namespace tilewright
