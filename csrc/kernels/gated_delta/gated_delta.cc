#include "kernels/gated_delta/gated_delta.h"

#include <algorithm>
#include <vector>

#include "base/parallel.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(gated_delta, GatedDeltaKernels)

namespace {

// Returns the heads or columns per item, of `total`: a few items per thread, but at least `least` each.
int64_t share_of(int64_t total, int64_t items_beside, int64_t least) {
  const int64_t wanted = ceil_div(4 * num_threads(), std::max<int64_t>(items_beside, 1));
  return std::max(round_up(ceil_div(total, wanted), least), least);
}

void add_steps(const GatedDeltaArgs& args, int64_t sequence, int64_t heads, std::vector<DeltaItem>& items) {
  for (int64_t head = 0; head < args.value_heads; head += heads)
    items.push_back({static_cast<int32_t>(sequence), static_cast<int32_t>(head),
                     static_cast<int32_t>(std::min(head + heads, args.value_heads)), 0,
                     static_cast<int32_t>(args.value_width)});
}

// Value heads of one key head share the preparation of q and k, so they stay together unless threads would be idle;
// then states are also cut by columns, which do not depend on each other.
void add_chunks(const GatedDeltaArgs& args, int64_t sequence, int64_t num_long, std::vector<DeltaItem>& items) {
  const int64_t heads = share_of(args.group(), num_long * args.key_heads, 1);
  const int64_t columns = share_of(args.value_width, num_long * args.value_heads, kStripColumns);
  for (int64_t head = 0; head < args.value_heads;) {
    const int64_t end = std::min(head + heads, round_up(head + 1, args.group()));
    for (int64_t column = 0; column < args.value_width; column += columns)
      items.push_back({static_cast<int32_t>(sequence), static_cast<int32_t>(head), static_cast<int32_t>(end),
                       static_cast<int32_t>(column),
                       static_cast<int32_t>(std::min(column + columns, args.value_width))});
    head = end;
  }
}

}  // namespace

void gated_delta_rule(const GatedDeltaArgs& args) {
  if (args.value_heads == 0 || args.value_width == 0) return;
  const GatedDeltaKernels& kernels = select(kTable);
  std::vector<int64_t> longs, shorts;
  for (int64_t b = 0; b < args.sequences.count; ++b) {
    if (args.sequences.num_tokens(b) > kStepTokens)
      longs.push_back(b);
    else if (args.sequences.num_tokens(b) > 0)
      shorts.push_back(b);
  }
  // The longest first, so that the last threads to finish have little left.
  std::stable_sort(longs.begin(), longs.end(),
                   [&](int64_t a, int64_t b) { return args.sequences.num_tokens(a) > args.sequences.num_tokens(b); });
  std::vector<DeltaItem> items;
  for (int64_t b : longs) add_chunks(args, b, static_cast<int64_t>(longs.size()), items);
  const int64_t num_long_items = static_cast<int64_t>(items.size());
  // A run of heads is one stream of states, each prefetched during the one before.
  const int64_t heads = share_of(args.value_heads, static_cast<int64_t>(shorts.size()), 1);
  for (int64_t b : shorts) add_steps(args, b, heads, items);
  parallel_for(static_cast<int64_t>(items.size()),
               [&](int64_t i) { i < num_long_items ? kernels.chunk(args, items[i]) : kernels.step(args, items[i]); });
}

}  // namespace tilewright
