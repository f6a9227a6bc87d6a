#include "kernels/rope/rope.h"

#include "base/parallel.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(rope, RopeKernels)

void rope_table(const RopeTableArgs& args) {
  const auto kernel = select(kTable).table;
  // A sine and a cosine take as long as some 16 bytes of a streaming kernel.
  const int64_t grain = grain_for(args.num_tokens, args.num_frequencies * 16);
  parallel_chunks(args.num_tokens, grain, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void rope(const RopeArgs& args) {
  const auto kernel = select(kTable).rope;
  int64_t heads = 0;
  for (int part = 0; part < args.num_parts; ++part) heads += args.parts[part].num_heads;
  const int64_t token_bytes = heads * args.head_width * static_cast<int64_t>(size_of(args.parts[0].x.dtype)) * 2;
  const int64_t grain = grain_for(args.num_tokens, token_bytes);
  parallel_chunks(args.num_tokens, grain, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace tilewright
