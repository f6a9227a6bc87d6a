#include "base/vec/scalar.h"
#include "kernels/rope/generic.h"

namespace tilewright {
extern const RopeKernels rope_scalar;
const RopeKernels rope_scalar = {rope_table_tokens, rope_tokens};
}  // namespace tilewright
