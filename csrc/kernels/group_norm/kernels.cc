#include "kernels/level.h"

#include TILEWRIGHT_VEC

#include "kernels/group_norm/generic.h"

namespace tilewright {
TILEWRIGHT_KERNELS(group_norm, GroupNormKernels) = {group_norm_stats, group_norm_apply};
}  // namespace tilewright
