#include "base/vec/scalar.h"
#include "kernels/moe/generic.h"

namespace tilewright {
extern const MoeKernels moe_scalar;
const MoeKernels moe_scalar = {route_tokens, combine_columns};
}  // namespace tilewright
