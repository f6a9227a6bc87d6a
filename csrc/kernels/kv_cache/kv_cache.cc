#include "kernels/kv_cache/kv_cache.h"

#include "base/parallel.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(kv_cache, KvCacheKernels)

void kv_store(const KvStoreArgs& args) {
  const KvCacheKernels& kernels = select(kTable);
  // Adjacent tokens share cache lines: runs of whole value tiles keep them on one thread.
  const int64_t token_bytes = args.layout.num_heads * args.layout.head_width * 4;
  const int64_t grain = round_up(grain_for(args.num_tokens, token_bytes), kTileDepth);
  parallel_chunks(args.num_tokens, grain, [&](int64_t begin, int64_t end) { kernels.store(args, begin, end); });
}

}  // namespace tilewright
