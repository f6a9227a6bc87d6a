#include "kernels/level.h"

#include TILEWRIGHT_VEC

#include "kernels/embedding/generic.h"

namespace tilewright {
TILEWRIGHT_KERNELS(embedding, EmbeddingKernels) = {gather_rows, gather_packed_rows, write_rows, add_rows};
}  // namespace tilewright
