#include "kernels/level.h"

#include TILEWRIGHT_VEC
#include "kernels/attention/vector_products.h"

#include "kernels/attention/generic.h"

namespace tilewright {
TILEWRIGHT_KERNELS(attention, AttentionKernels) = {kDotProduct.text, run_items, merge_item, pack_keys, pack_values};
}  // namespace tilewright
