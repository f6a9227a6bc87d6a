#include "kernels/norm/norm.h"

#include "base/parallel.h"
#include "base/stream.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(norm, NormKernels)

namespace {

template <class Kernel>
void over_rows(NormArgs args, Kernel kernel) {
  const int64_t rows = args.outer * args.inner;
  const int64_t row_bytes = args.width * static_cast<int64_t>(size_of(args.x.dtype));
  args.stream = worth_streaming(args.y.data, args.x.data, rows * row_bytes);
  parallel_chunks(rows, grain_for(rows, 2 * row_bytes), [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace

void rms_norm(const NormArgs& args) { over_rows(args, select(kTable).rms_norm); }
void layer_norm(const NormArgs& args) { over_rows(args, select(kTable).layer_norm); }

}  // namespace tilewright
