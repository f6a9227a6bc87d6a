#include "kernels/level.h"

#include TILEWRIGHT_VEC

#include "kernels/moe/generic.h"

namespace tilewright {
TILEWRIGHT_KERNELS(moe, MoeKernels) = {route_tokens, combine_columns};
}  // namespace tilewright
