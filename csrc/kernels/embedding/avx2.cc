#include "base/vec/avx2.h"
#include "kernels/embedding/generic.h"

namespace tilewright {
extern const EmbeddingKernels embedding_avx2;
const EmbeddingKernels embedding_avx2 = {gather_rows, gather_packed_rows, write_rows, add_rows};
}  // namespace tilewright
