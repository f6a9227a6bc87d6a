#include "base/vec/avx2.h"
#include "kernels/rope/generic.h"

namespace tilewright {
extern const RopeKernels rope_avx2;
const RopeKernels rope_avx2 = {rope_table_tokens, rope_tokens};
}  // namespace tilewright
