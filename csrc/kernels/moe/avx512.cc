#include "base/vec/avx512.h"
#include "kernels/moe/generic.h"

namespace tilewright {
extern const MoeKernels moe_avx512;
const MoeKernels moe_avx512 = {route_tokens, combine_columns};
}  // namespace tilewright
