#include "kernels/reduce/reduce.h"

#include "base/parallel.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(reduce, ReduceKernels)

void reduce(const ReduceArgs& args) {
  const int64_t bytes = (args.num_summands + 1) * static_cast<int64_t>(size_of(args.x_dtype));
  const auto kernel = select(kTable).reduce_span;
  parallel_chunks(args.count, grain_for(args.count, bytes),
                  [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void reduce_span(const ReduceArgs& args, int64_t begin, int64_t end) { select(kTable).reduce_span(args, begin, end); }

}  // namespace tilewright
