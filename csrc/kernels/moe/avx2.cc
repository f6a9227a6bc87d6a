#include "base/vec/avx2.h"
#include "kernels/moe/generic.h"

namespace tilewright {
extern const MoeKernels moe_avx2;
const MoeKernels moe_avx2 = {route_tokens, combine_columns};
}  // namespace tilewright
