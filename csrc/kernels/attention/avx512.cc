#include "base/vec/avx512.h"
#include "kernels/attention/vector_products.h"

// Products before what is written in terms of them.
#include "kernels/attention/generic.h"

namespace tilewright {
extern const AttentionKernels attention_avx512;
const AttentionKernels attention_avx512 = {run_items, merge_item, pack_keys, pack_values};
}  // namespace tilewright
