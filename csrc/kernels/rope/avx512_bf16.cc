#include "base/vec/avx512.h"
#include "kernels/rope/generic.h"

namespace tilewright {
extern const RopeKernels rope_avx512_bf16;
const RopeKernels rope_avx512_bf16 = {rope_table_tokens, rope_tokens};
}  // namespace tilewright
