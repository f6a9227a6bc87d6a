#include "kernels/linear/linear.h"

#include <algorithm>

#include "base/arch.h"
#include "base/parallel.h"
#include "base/scratch.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(linear, LinearKernels)

const LinearKernels& linear_kernels() { return select(kTable); }

WeightLayout layout_of(WeightFormat format) {
  return format == WeightFormat::bf16 ? linear_kernels().bf16_layout : WeightLayout::tiles;
}

// Half of the second-level cache, a chunk of depth at a time; quantised products use the whole depth at once.
int64_t blocks_per_group(const LinearArgs& args, int64_t block_bytes, int64_t num_blocks) {
  const int64_t depth_tiles = args.weight.num_depth_tiles();
  const int64_t chunk = rounds_x(args.weight.format) ? depth_tiles : std::min<int64_t>(depth_tiles, kDepthChunk);
  int64_t group = kCoreCacheBytes / 2 * depth_tiles / (block_bytes * chunk);
  if (group < 1) group = 1;
  // Equal groups: 9 blocks as 5 + 4, not 8 + 1.
  return ceil_div(num_blocks, ceil_div(num_blocks, group));
}

void linear(const LinearArgs& args) {
  if (args.m == 0 || args.weight.n == 0) return;
  const LinearKernels& kernels = linear_kernels();
  const int64_t num_blocks = ceil_div(args.m, kRowBlock);
  const int64_t block_bytes = kernels.block_bytes(args);
  char* packed_x = static_cast<char*>(shared_scratch(num_blocks * block_bytes));

  const int64_t num_strips = args.weight.num_strips();
  const int64_t group = blocks_per_group(args, block_bytes, num_blocks);
  const int64_t num_groups = ceil_div(num_blocks, group);
  // Each thread gets several tasks, each a run of adjacent strips: one long stream of weights.
  const int64_t turns = num_threads() * 8;
  // An odd number: streams a power of two apart meet in the same memory banks and lose a quarter of the bandwidth.
  const int64_t strips_per_task = ceil_div(num_strips * num_groups, turns) | 1;
  const int64_t tasks_per_group = ceil_div(num_strips, strips_per_task);
  parallel_stages({num_blocks, num_groups * tasks_per_group}, [&](int stage, int64_t task) {
    if (stage == 0) return kernels.pack_block(args, task, packed_x + task * block_bytes);
    const int64_t block = task / tasks_per_group * group;
    const int64_t strip = task % tasks_per_group * strips_per_task;
    kernels.run(args, packed_x, block, std::min(block + group, num_blocks), strip,
                std::min(strip + strips_per_task, num_strips));
  });
}

}  // namespace tilewright
