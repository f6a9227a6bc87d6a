#include "base/vec/scalar.h"
#include "kernels/attention/vector_products.h"

// Products before what is written in terms of them.
#include "kernels/attention/generic.h"

namespace tilewright {
extern const AttentionKernels attention_scalar;
const AttentionKernels attention_scalar = {run_items, merge_item, pack_keys, pack_values};
}  // namespace tilewright
