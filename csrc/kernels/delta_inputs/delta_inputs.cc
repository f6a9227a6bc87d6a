#include "kernels/delta_inputs/delta_inputs.h"

#include <cstring>

#include "base/parallel.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(delta_inputs, DeltaInputsKernels)

namespace {

// Copies the next `count` elements of a packed row to their destination.
struct Reader {
  const char* source;
  int64_t element_bytes;

  void copy(const Rows& target, int64_t row, int64_t column, int64_t count) {
    const size_t bytes = static_cast<size_t>(count * element_bytes);
    std::memcpy(static_cast<char*>(target.data) + (row * target.stride + column) * element_bytes, source, bytes);
    source += bytes;
  }
};

void split_token(const SplitArgs& args, int64_t token) {
  const int64_t element = static_cast<int64_t>(size_of(args.qkvz.dtype));
  // The contiguous form is the interleaved one with a single group of all heads.
  const int64_t groups = args.interleaved ? args.key_heads : 1;
  const int64_t keys = args.key_heads / groups * args.key_width, heads = args.value_heads / groups;
  const int64_t values = heads * args.value_width;
  Reader packed = {static_cast<const char*>(args.qkvz.from(token).data), element};
  Reader gates = {static_cast<const char*>(args.ba.from(token).data), element};
  for (int64_t group = 0; group < groups; ++group) {
    packed.copy(args.qkv, token, group * keys, keys);
    packed.copy(args.qkv, token, (groups + group) * keys, keys);
    packed.copy(args.qkv, token, 2 * groups * keys + group * values, values);
    packed.copy(args.z, token, group * values, values);
    gates.copy(args.b, token, group * heads, heads);
    gates.copy(args.a, token, group * heads, heads);
  }
}

}  // namespace

void split_projections(const SplitArgs& args) {
  const int64_t row_elements = 2 * (args.key_heads * args.key_width + args.value_heads * (args.value_width + 1));
  const int64_t row_bytes = row_elements * static_cast<int64_t>(size_of(args.qkvz.dtype));
  parallel_chunks(args.num_tokens, grain_for(args.num_tokens, 2 * row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) split_token(args, token);
  });
}

void delta_gates(const GatesArgs& args) {
  const auto kernel = select(kTable).gates;
  // An element costs two exponentials and a division: as much as moving some 64 bytes.
  const int64_t grain = grain_for(args.num_tokens, 64 * args.num_heads);
  parallel_chunks(args.num_tokens, grain, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace tilewright
