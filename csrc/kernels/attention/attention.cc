#include "kernels/attention/attention.h"

#include <algorithm>
#include <vector>

#include "base/parallel.h"
#include "base/scratch.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(attention, AttentionKernels)

namespace {

// Blocks of keys per item if a sequence's keys are split among items: 1,024 tokens, half a megabyte of a 128-wide head,
// long enough to stream and short enough to balance.
constexpr int kBlocksPerItem = 2;

// Returns the blocks that any of rows [row_begin, row_begin + rows) sees: later rows see later keys.
std::pair<int32_t, int32_t> blocks_seen(const AttentionArgs& args, int64_t sequence, int64_t row_begin, int64_t rows) {
  const int64_t keys = args.kv_lengths[sequence];
  const int64_t offset = keys - (args.query_starts[sequence + 1] - args.query_starts[sequence]);
  const int64_t first = offset + row_begin / args.group(), last = offset + (row_begin + rows - 1) / args.group();
  int64_t begin = 0, end = keys;
  if (args.causal) end = std::min(end, last + 1);
  if (args.window > 0) {
    begin = std::max<int64_t>(0, first - args.window + 1);
    end = std::min(end, last + args.window);
  }
  if (end <= begin) return {0, 0};
  return {static_cast<int32_t>(begin / kKeyBlock), static_cast<int32_t>(ceil_div(end, kKeyBlock))};
}

struct Plan {
  std::vector<AttentionItem> items, merges;
  std::vector<int64_t> partial_offsets;  // of merges[i], in floats
  int64_t partial_size = 0;
};

Plan plan_items(const AttentionArgs& args) {
  Plan plan;
  for (int64_t sequence = 0; sequence < args.num_sequences; ++sequence) {
    const int64_t rows = (args.query_starts[sequence + 1] - args.query_starts[sequence]) * args.group();
    for (int64_t row = 0; row < rows; row += kQueryRows) {
      const int64_t count = std::min<int64_t>(kQueryRows, rows - row);
      const auto [begin, end] = blocks_seen(args, sequence, row, count);
      const bool share = rows <= kQueryRows && end - begin > kBlocksPerItem;
      for (int64_t head = 0; head < args.layout.num_heads; ++head) {
        AttentionItem item = {static_cast<int32_t>(sequence),
                              static_cast<int32_t>(head),
                              static_cast<int32_t>(row),
                              static_cast<int32_t>(count),
                              begin,
                              end,
                              nullptr};
        if (!share) {
          plan.items.push_back(item);
          continue;
        }
        // Slots are numbered from block 0; those before block_begin are never touched, so leave them out.
        const int64_t slot = partial_floats(count, args.layout);
        plan.partial_offsets.push_back(plan.partial_size - begin * slot);
        plan.partial_size += (end - begin) * slot;
        plan.merges.push_back(item);
      }
    }
  }
  return plan;
}

// Splits each item of plan.merges into items over runs of blocks, with their place in `partials`.
void share_blocks(Plan& plan, float* partials) {
  for (size_t i = 0; i < plan.merges.size(); ++i) {
    AttentionItem& whole = plan.merges[i];
    whole.partials = partials + plan.partial_offsets[i];
    for (int32_t block = whole.block_begin; block < whole.block_end; block += kBlocksPerItem) {
      AttentionItem part = whole;
      part.block_begin = block;
      part.block_end = std::min(block + kBlocksPerItem, whole.block_end);
      plan.items.push_back(part);
    }
  }
}

// Runs items of a plan, adjacent ones of a sequence and head together as long as each thread gets some turns.
void run_plan(const AttentionKernels& kernels, const AttentionArgs& args, std::vector<AttentionItem>& items) {
  std::stable_sort(items.begin(), items.end(), [](const AttentionItem& a, const AttentionItem& b) {
    return std::pair(a.sequence, a.head) < std::pair(b.sequence, b.head);
  });
  const int64_t most = std::min<int64_t>(kItemsAtOnce, static_cast<int64_t>(items.size()) / (4 * num_threads()));
  struct Group {
    size_t first;
    int count;
  };
  std::vector<Group> groups;
  auto joins = [&](const AttentionItem& item) {
    if (groups.empty() || groups.back().count >= most) return false;
    const AttentionItem& first = items[groups.back().first];
    return first.sequence == item.sequence && first.head == item.head && first.rows == kQueryRows &&
           item.rows == kQueryRows && !item.partials && !first.partials;
  };
  for (size_t i = 0; i < items.size(); ++i) {
    if (joins(items[i]))
      ++groups.back().count;
    else
      groups.push_back({i, 1});
  }
  parallel_for(static_cast<int64_t>(groups.size()),
               [&](int64_t i) { kernels.run(args, &items[groups[i].first], groups[i].count); });
}

}  // namespace

void paged_attention(const AttentionArgs& args) {
  const AttentionKernels& kernels = select(kTable);
  Plan plan = plan_items(args);
  if (!plan.merges.empty()) share_blocks(plan, static_cast<float*>(shared_scratch(plan.partial_size * sizeof(float))));
  run_plan(kernels, args, plan.items);
  parallel_for(static_cast<int64_t>(plan.merges.size()), [&](int64_t i) { kernels.merge(args, plan.merges[i]); });
}

void varlen_attention(const VarlenArgs& args) {
  const AttentionKernels& kernels = select(kTable);
  VarlenArgs packing = args;
  AttentionArgs& attention = packing.attention;
  attention.layout.page_size = kKeyBlock;
  const int64_t num_sequences = attention.num_sequences;

  std::vector<int32_t> lengths(num_sequences);
  int64_t num_pages = 0, most_pages = 1;
  for (int64_t b = 0; b < num_sequences; ++b) {
    lengths[b] = args.key_starts[b + 1] - args.key_starts[b];
    most_pages = std::max(most_pages, ceil_div(lengths[b], kKeyBlock));
    num_pages += ceil_div(lengths[b], kKeyBlock);
  }
  // The page tables of all sequences, concatenated.
  std::vector<int32_t> table(num_sequences * most_pages);
  std::vector<TokenPiece> pieces;
  int64_t page = 0;
  for (int64_t b = 0; b < num_sequences; ++b) {
    for (int64_t i = 0; i < lengths[b]; i += kTileDepth) {
      if (i % kKeyBlock == 0) table[b * most_pages + i / kKeyBlock] = static_cast<int32_t>(page++);
      const int64_t count = std::min<int64_t>(kTileDepth, lengths[b] - i);
      pieces.push_back({b, args.key_starts[b] + i, count, page - 1, i % kKeyBlock});
    }
  }

  const KvLayout& layout = attention.layout;
  std::vector<HeadScales> scales;
  if (kernels.scale_head && attention.q.dtype == DType::bf16 && attention.kv_dtype == DType::bf16) {
    scales.resize(num_sequences * layout.num_heads);
    parallel_for(static_cast<int64_t>(scales.size()), [&](int64_t i) {
      scales[i] = kernels.scale_head(packing, i / layout.num_heads, i % layout.num_heads);
    });
    attention.kv_dtype = DType::f16;
    attention.head_scales = scales.data();
  }
  const int64_t element = static_cast<int64_t>(size_of(attention.kv_dtype));
  char* pages = static_cast<char*>(shared_scratch(num_pages * layout.page_elements() * element));
  parallel_for(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    const TokenPiece& piece = pieces[i];
    for (int64_t head = 0; head < layout.num_heads; ++head) {
      char* base = pages + (piece.page * layout.page_elements() + head * layout.head_elements()) * element;
      kernels.pack_keys(packing, piece, head, base + layout.key_tile(piece.in_page) * element);
      kernels.pack_values(packing, piece, head, base + layout.value_tile(piece.in_page) * element);
    }
  });

  attention.pages = pages;
  attention.block_table = table.data();
  attention.block_table_stride = most_pages;
  attention.kv_lengths = lengths.data();
  const Plan plan = plan_items(attention);
  // A sequence of few queries and many keys is not split here: the pages already occupy the scratch memory.
  std::vector<AttentionItem> items = plan.items;
  items.insert(items.end(), plan.merges.begin(), plan.merges.end());
  run_plan(kernels, attention, items);
}

}  // namespace tilewright
