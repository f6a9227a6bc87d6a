#include "kernels/embedding/embedding.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "base/parallel.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(embedding, EmbeddingKernels)

namespace {

template <class Args, class Kernel>
void over_rows(const Args& args, Kernel kernel, int64_t bytes_per_element) {
  const int64_t grain = grain_for(args.count, args.width * bytes_per_element);
  parallel_chunks(args.count, grain, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

// Replays check hundreds of numbers, nearly always all in range: all are compared first, branchless and in their own
// type, which the compiler vectorises.
template <class Id>
int64_t first_outside(const Id* ids, int64_t count, int64_t limit, int64_t least) {
  const Id lowest = static_cast<Id>(std::max<int64_t>(least, std::numeric_limits<Id>::min()));
  const Id highest = static_cast<Id>(std::min<int64_t>(limit - 1, std::numeric_limits<Id>::max()));
  Id outside = 0;
  for (int64_t i = 0; i < count; ++i) outside |= static_cast<Id>((ids[i] < lowest) | (ids[i] > highest));
  for (int64_t i = 0; outside; ++i)
    if (ids[i] < lowest || ids[i] > highest) return i;
  return -1;
}

}  // namespace

void embedding(const EmbeddingArgs& args) {
  const EmbeddingKernels& kernels = select(kTable);
  const auto size = static_cast<int64_t>(size_of(args.out.dtype));
  // In a packed table each pair costs a cache line.
  const bool is_packed = args.packed.data != nullptr;
  over_rows(args, is_packed ? kernels.gather_packed : kernels.gather, is_packed ? 32 : 2 * size);
}

void scatter_rows(const ScatterArgs& args) {
  const EmbeddingKernels& kernels = select(kTable);
  over_rows(args, args.accumulate ? kernels.add : kernels.write, 3 * static_cast<int64_t>(size_of(args.out.dtype)));
}

int64_t first_out_of_range(const void* ids, DType id_dtype, int64_t count, int64_t limit, int64_t least) {
  if (id_dtype == DType::i64) return first_outside(static_cast<const int64_t*>(ids), count, limit, least);
  return first_outside(static_cast<const int32_t*>(ids), count, limit, least);
}

int64_t first_repeated(const int64_t* rows, int64_t count, int64_t limit) {
  std::vector<bool> seen(static_cast<size_t>(limit));
  for (int64_t i = 0; i < count; ++i) {
    if (seen[static_cast<size_t>(rows[i])]) return i;
    seen[static_cast<size_t>(rows[i])] = true;
  }
  return -1;
}

}  // namespace tilewright
