#include "kernels/level.h"

#include TILEWRIGHT_VEC
#include TILEWRIGHT_QUADS

#include "kernels/linear/generic.h"

namespace tilewright {
TILEWRIGHT_KERNELS(linear, LinearKernels) = {kDotProduct.text, WeightLayout::tiles, linear_block_bytes,
                                             linear_pack_block, linear_run<>};
}  // namespace tilewright
