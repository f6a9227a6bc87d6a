#include "kernels/image/image.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/parallel.h"
#include "base/tile.h"
#include "kernels/manifest.h"

namespace tilewright {

TILEWRIGHT_TABLE(image, ImageKernels)

namespace {

constexpr int kFractionBits = 22;

double triangle(double x) { return std::max(0.0, 1.0 - std::fabs(x)); }

// Keys' cubic with a = -0.5, in the order of operations of Pillow.
double cubic(double x) {
  constexpr double a = -0.5;
  x = std::fabs(x);
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
  if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * a;
  return 0.0;
}

struct AxisStorage {
  std::vector<int32_t> begin, num_taps;
  std::vector<int16_t> pairs;
};

// Pillow's precompute_coeffs and normalize_coeffs_8bpc, the weights split into the two parts the kernels multiply by.
AxisWeights axis_weights(int64_t in_size, int64_t out_size, ImageFilter filter, AxisStorage& storage) {
  AxisWeights weights{in_size, out_size};
  if (in_size == out_size) return weights;
  const double scale = static_cast<double>(in_size) / static_cast<double>(out_size);
  const double filter_scale = std::max(scale, 1.0);
  const double support = (filter == ImageFilter::bicubic ? 2.0 : 1.0) * filter_scale;
  const double inverse_scale = 1.0 / filter_scale;
  const int64_t max_taps = static_cast<int64_t>(std::ceil(support)) * 2 + 1;
  weights.max_pairs = ceil_div(max_taps, 2);
  storage.begin.resize(out_size);
  storage.num_taps.resize(out_size);
  storage.pairs.assign(out_size * weights.max_pairs * 4, 0);
  std::vector<double> taps(max_taps);
  for (int64_t position = 0; position < out_size; ++position) {
    const double center = (static_cast<double>(position) + 0.5) * scale;
    const int64_t begin = std::max<int64_t>(0, static_cast<int64_t>(center - support + 0.5));
    const int64_t count = std::min(in_size, static_cast<int64_t>(center + support + 0.5)) - begin;
    double total = 0;
    for (int64_t i = 0; i < count; ++i) {
      const double x = (static_cast<double>(i + begin) - center + 0.5) * inverse_scale;
      taps[i] = filter == ImageFilter::bicubic ? cubic(x) : triangle(x);
      total += taps[i];
    }
    for (int64_t i = 0; i < count; ++i) {
      const double weight = (total != 0.0 ? taps[i] / total : taps[i]) * (1 << kFractionBits);
      const int32_t fixed = static_cast<int32_t>(weight < 0 ? weight - 0.5 : weight + 0.5);
      int16_t* pair = &storage.pairs[(position * weights.max_pairs + i / 2) * 4];
      pair[i % 2] = static_cast<int16_t>(fixed >> kWeightLowBits);
      pair[2 + i % 2] = static_cast<int16_t>(fixed & ((1 << kWeightLowBits) - 1));
    }
    storage.begin[position] = static_cast<int32_t>(begin);
    storage.num_taps[position] = static_cast<int32_t>(count);
  }
  weights.begin = storage.begin.data();
  weights.num_taps = storage.num_taps.data();
  weights.pairs = storage.pairs.data();
  return weights;
}

// Returns the most source positions needed by `step` consecutive output positions, counted from a multiple of step.
int64_t widest_range(const AxisWeights& weights, int64_t step) {
  if (weights.identity()) return std::min(step, weights.out_size);
  int64_t widest = 0;
  for (int64_t first = 0; first < weights.out_size; first += step) {
    const int64_t last = std::min(first + step, weights.out_size) - 1;
    widest = std::max(widest, weights.end(last) - weights.begin[first]);
  }
  return widest;
}

using BandKernel = void (*)(const ImagePlan& plan, int64_t band_begin, int64_t band_end);

void over_bands(const ImageArgs& args, int64_t band_rows, int vector_bytes, BandKernel kernel) {
  AxisStorage horizontal, vertical;
  ImagePlan plan;
  plan.args = args;
  plan.horizontal = axis_weights(args.in_width, args.width, args.filter, horizontal);
  plan.vertical = axis_weights(args.in_height, args.height, args.filter, vertical);
  plan.band_rows = band_rows;
  plan.bands_per_frame = ceil_div(args.height, band_rows);
  plan.vertical_first = args.height < args.in_height && args.in_height - args.height > 2 * (args.in_width - args.width);
  plan.strip_rows = plan.vertical_first ? band_rows : widest_range(plan.vertical, band_rows);
  // The horizontal pass keeps a chunk's source columns transposed, vector_bytes rows of 3 bytes a column: as many
  // columns as fit half of a 512 KB L2, but at least 16 outputs.
  const double scale = static_cast<double>(args.in_width) / static_cast<double>(args.width);
  const double fitting = (256 << 10) / (3.0 * vector_bytes * std::max(scale, 1.0));
  plan.chunk_columns = std::clamp<int64_t>(static_cast<int64_t>(fitting) / 16 * 16, 16, 256);
  plan.chunk_source_columns = widest_range(plan.horizontal, plan.chunk_columns);
  // Consecutive tasks both resize the few source rows they share: three tasks a thread keep that under a tenth.
  const int64_t bands = args.frames * plan.bands_per_frame;
  parallel_chunks(bands, ceil_div(bands, num_threads() * 3),
                  [&](int64_t begin, int64_t end) { kernel(plan, begin, end); });
}

}  // namespace

void image_resize(const ImageArgs& args) {
  const ImageKernels& kernels = select(kTable);
  over_bands(args, 32, kernels.vector_bytes, kernels.resize);
}

void image_patches(const ImageArgs& args) {
  const ImageKernels& kernels = select(kTable);
  over_bands(args, args.patch_size * args.merge_size, kernels.vector_bytes, kernels.patches);
}

}  // namespace tilewright
