#include "kernels/group_norm/group_norm.h"

#include <algorithm>
#include <cmath>

#include "base/bf16.h"
#include "base/parallel.h"
#include "base/scratch.h"
#include "base/stream.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(group_norm, GroupNormKernels)

namespace {

// Elements of a chunk: enough for a task, few enough for fp32 sums and for the cache.
constexpr int64_t kChunkElements = 32768;

float parameter(const void* values, DType dtype, int64_t i, float otherwise) {
  if (!values) return otherwise;
  return dtype == DType::f32 ? static_cast<const float*>(values)[i] : to_float(static_cast<const bf16*>(values)[i]);
}

struct Moments {
  double mean, variance;
};

// Merges the stats of a group's chunks, each `groups` apart.
Moments merge_chunks(const GroupNormArgs& args, const GroupStats* stats, int64_t chunk_pixels) {
  const int64_t width = args.channels / args.groups;
  double count = 0, mean = 0, squares = 0;
  for (int64_t begin = 0; begin < args.pixels; begin += chunk_pixels, stats += args.groups) {
    const double added = static_cast<double>(std::min(chunk_pixels, args.pixels - begin) * width);
    const double distance = stats->mean - mean;
    count += added;
    mean += distance * added / count;
    squares += stats->squares + distance * distance * (count - added) * added / count;
  }
  return {mean, squares / count};
}

// Fills in the table of a group's channels.
void fill_table(const GroupNormArgs& args, const Moments& moments, int64_t group, float* table) {
  const int64_t width = args.channels / args.groups;
  const double scale = 1.0 / std::sqrt(moments.variance + args.eps);
  for (int64_t i = group * width; i < (group + 1) * width; ++i) {
    table[i] = static_cast<float>(moments.mean);
    table[args.channels + i] = static_cast<float>(scale * parameter(args.weight, args.weight_dtype, i, 1.0f));
    table[2 * args.channels + i] = parameter(args.bias, args.weight_dtype, i, 0.0f);
  }
}

int64_t pixels_of_chunk(const GroupNormArgs& args) { return std::max<int64_t>(kChunkElements / args.channels, 1); }

}  // namespace

void group_norm(const GroupNormArgs& given) {
  GroupNormArgs args = given;
  if (args.batch * args.pixels * args.channels == 0) return;
  const GroupNormKernels& kernels = select(kTable);
  const int64_t total_bytes = args.batch * args.pixels * args.channels * static_cast<int64_t>(size_of(args.x.dtype));
  args.stream = worth_streaming(args.y.data, args.x.data, total_bytes);
  const int64_t chunk_pixels = pixels_of_chunk(args);
  const int64_t chunks = ceil_div(args.pixels, chunk_pixels);
  const int64_t num_stats = args.batch * chunks * args.groups, table_size = 3 * args.channels;
  const size_t stat_bytes = static_cast<size_t>(round_up(num_stats * static_cast<int64_t>(sizeof(GroupStats)), 64));
  char* memory =
      static_cast<char*>(shared_scratch(stat_bytes + static_cast<size_t>(args.batch * table_size) * sizeof(float)));
  GroupStats* stats = reinterpret_cast<GroupStats*>(memory);
  float* tables = reinterpret_cast<float*>(memory + stat_bytes);
  const int64_t num_chunks = args.batch * chunks;
  parallel_stages({num_chunks, args.batch * args.groups, num_chunks}, [&](int stage, int64_t task) {
    if (stage == 1) {
      const int64_t item = task / args.groups, group = task % args.groups;
      const Moments moments = merge_chunks(args, stats + item * chunks * args.groups + group, chunk_pixels);
      return fill_table(args, moments, group, tables + item * table_size);
    }
    const int64_t item = task / chunks, begin = task % chunks * chunk_pixels;
    const int64_t row = item * args.pixels + begin;
    const int64_t end = row + std::min(chunk_pixels, args.pixels - begin);
    if (stage == 0)
      kernels.stats(args, row, end, stats + task * args.groups);
    else
      kernels.apply(args, tables + item * table_size, row, end);
  });
}

void group_statistics(const GroupStatisticsArgs& given) {
  const GroupNormArgs& args = given.norm;
  if (args.batch * args.pixels * args.channels == 0) return;
  const GroupNormKernels& kernels = select(kTable);
  const int64_t chunk_pixels = pixels_of_chunk(args), chunks = ceil_div(args.pixels, chunk_pixels);
  const int64_t num_chunks = args.batch * chunks;
  GroupStats* stats =
      static_cast<GroupStats*>(shared_scratch(static_cast<size_t>(num_chunks * args.groups) * sizeof(GroupStats)));
  parallel_stages({num_chunks, args.batch * args.groups}, [&](int stage, int64_t task) {
    if (stage == 1) {
      const int64_t item = task / args.groups, group = task % args.groups;
      const Moments moments = merge_chunks(args, stats + item * chunks * args.groups + group, chunk_pixels);
      given.statistics[2 * task] = static_cast<float>(moments.mean);
      given.statistics[2 * task + 1] = static_cast<float>(moments.variance);
      return;
    }
    const int64_t begin = task % chunks * chunk_pixels, row = task / chunks * args.pixels + begin;
    kernels.stats(args, row, row + std::min(chunk_pixels, args.pixels - begin), stats + task * args.groups);
  });
}

}  // namespace tilewright
