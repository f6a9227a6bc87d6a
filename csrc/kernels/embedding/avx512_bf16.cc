#include "base/vec/avx512.h"
#include "kernels/embedding/generic.h"

namespace tilewright {
extern const EmbeddingKernels embedding_avx512_bf16;
const EmbeddingKernels embedding_avx512_bf16 = {gather_rows, gather_packed_rows, write_rows, add_rows};
}  // namespace tilewright
