#include "kernels/activation/activation.h"

#include <algorithm>

#include "base/parallel.h"
#include "base/stream.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(activation, ActivationKernels)

namespace {

// Tasks are spans rather than rows: a decode step has one wide row, a flattened tensor one very long one.
constexpr int64_t kSpan = 8192;

template <class Kernel>
void over_spans(ElementwiseArgs args, Kernel kernel) {
  const auto size = static_cast<int64_t>(size_of(args.x.dtype));
  args.stream =
      args.y.data != args.other.data && worth_streaming(args.y.data, args.x.data, args.rows * args.width * size);
  const int64_t spans_per_row = (args.width + kSpan - 1) / kSpan;
  const int64_t spans = args.rows * spans_per_row;
  const int64_t span_bytes = std::min(args.width, kSpan) * size * 3;
  parallel_chunks(spans, grain_for(spans, span_bytes), [&](int64_t first, int64_t last) {
    for (int64_t span = first; span < last; ++span) {
      const int64_t begin = span % spans_per_row * kSpan;
      kernel(args, span / spans_per_row, begin, std::min(begin + kSpan, args.width));
    }
  });
}

}  // namespace

void activate(const ElementwiseArgs& args) { over_spans(args, select(kTable).activate); }
void gate(const ElementwiseArgs& args) { over_spans(args, select(kTable).gate); }
void add(const ElementwiseArgs& args) { over_spans(args, select(kTable).add); }

namespace {

template <class Args, class Kernel>
void over_rows(const Args& args, int64_t tensors, Kernel kernel) {
  const int64_t rows = args.outer * args.inner;
  const int64_t row_bytes = args.width * static_cast<int64_t>(size_of(args.x.dtype)) * tensors;
  parallel_chunks(rows, grain_for(rows, row_bytes), [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace

void sigmoid_gate(const SigmoidGateArgs& args) { over_rows(args, 3, select(kTable).sigmoid_gate); }
void snake(const SnakeArgs& args) { over_rows(args, 2, select(kTable).snake); }

}  // namespace tilewright
