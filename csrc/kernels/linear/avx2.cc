#include "base/vec/avx2.h"
#include "kernels/linear/generic.h"

namespace tilewright {
extern const LinearKernels linear_avx2;
const LinearKernels linear_avx2 = {linear_block_bytes, linear_pack_block, linear_run};
}  // namespace tilewright
