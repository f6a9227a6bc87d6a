#include "base/vec/scalar.h"
#include "kernels/linear/generic.h"

namespace tilewright {
extern const LinearKernels linear_scalar;
const LinearKernels linear_scalar = {linear_block_bytes, linear_pack_block, linear_run};
}  // namespace tilewright
