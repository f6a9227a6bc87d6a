#include "kernels/conv/conv.h"

#include <algorithm>
#include <vector>

#include "base/parallel.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(conv, ConvKernels)

namespace {

constexpr int64_t kTokensPerPiece = 32;
// 2,048 channels of some tokens are enough work for a task, and long enough rows to stream.
constexpr int64_t kChannelsPerPiece = 2048;

// Adds pieces of some tokens of a sequence, cut by channels.
void add_pieces(const ConvArgs& args, int64_t sequence, int64_t begin, int64_t end, std::vector<ConvPiece>& pieces) {
  for (int64_t channel = 0; channel < args.channels; channel += kChannelsPerPiece)
    pieces.push_back({static_cast<int32_t>(sequence), static_cast<int32_t>(begin), static_cast<int32_t>(end),
                      static_cast<int32_t>(channel),
                      static_cast<int32_t>(std::min(channel + kChannelsPerPiece, args.channels))});
}

}  // namespace

void causal_conv(const ConvArgs& args) {
  const ConvKernels& kernels = select(kTable);
  // A sequence of one piece of tokens keeps its states on the way; the others compute all outputs first, because a
  // state that is written may be the one that the first tokens read.
  std::vector<ConvPiece> alone, pieces, keeping;
  for (int64_t b = 0; b < args.sequences.count; ++b) {
    const int64_t begin = args.sequences.starts[b], end = args.sequences.starts[b + 1];
    if (begin == end) continue;
    if (end - begin <= kTokensPerPiece) {
      add_pieces(args, b, begin, end, alone);
      continue;
    }
    for (int64_t token = begin; token < end; token += kTokensPerPiece)
      add_pieces(args, b, token, std::min(token + kTokensPerPiece, end), pieces);
    add_pieces(args, b, begin, end, keeping);
  }
  const int64_t num_pieces = static_cast<int64_t>(pieces.size());
  const int64_t counts[] = {num_pieces + static_cast<int64_t>(alone.size()), static_cast<int64_t>(keeping.size())};
  auto run = [&](int stage, int64_t task) {
    if (stage == 1) return kernels.keep(args, keeping[task]);
    const ConvPiece& piece = task < num_pieces ? pieces[task] : alone[task - num_pieces];
    kernels.convolve(args, piece);
    if (task >= num_pieces) kernels.keep(args, piece);
  };
  parallel_stages(counts, run);
}

}  // namespace tilewright
