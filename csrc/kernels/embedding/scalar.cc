#include "base/vec/scalar.h"
#include "kernels/embedding/generic.h"

namespace tilewright {
extern const EmbeddingKernels embedding_scalar;
const EmbeddingKernels embedding_scalar = {gather_rows, gather_packed_rows, write_rows, add_rows};
}  // namespace tilewright
