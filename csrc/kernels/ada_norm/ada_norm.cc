#include "kernels/ada_norm/ada_norm.h"

#include "base/parallel.h"
#include "base/stream.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(ada_norm, AdaNormKernels)

namespace {

template <class Kernel>
void over_rows(AdaNormArgs args, Kernel kernel) {
  const int64_t row_bytes = args.width * static_cast<int64_t>(size_of(args.x.dtype));
  args.stream =
      args.y.data != args.residual.data && worth_streaming(args.y.data, args.x.data, args.num_rows * row_bytes);
  parallel_chunks(args.num_rows, grain_for(args.num_rows, 2 * row_bytes),
                  [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace

void ada_norm(const AdaNormArgs& args) { over_rows(args, select(kTable).ada_norm); }
void gated_add(const AdaNormArgs& args) { over_rows(args, select(kTable).gated_add); }

}  // namespace tilewright
