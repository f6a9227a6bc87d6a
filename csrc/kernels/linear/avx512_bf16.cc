#include "base/vec/avx512.h"
#include "kernels/linear/generic.h"

namespace tilewright {
extern const LinearKernels linear_avx512_bf16;
const LinearKernels linear_avx512_bf16 = {linear_block_bytes, linear_pack_block, linear_run};
}  // namespace tilewright
