// Pictures of odd sizes between guard pages: a row's last pixels are read and written to the byte and no further.
#include "kernels/image/image.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "testing/testing.h"

namespace tilewright::testing {
namespace {

struct Size {
  int64_t in_height, in_width, height, width;
};

// Both passes, only one of them, neither; up and down; the last with the vertical pass first.
constexpr Size kSizes[] = {{1, 1, 3, 5},     {7, 5, 1, 1},     {70, 33, 20, 33},  {33, 70, 33, 20},  {9, 21, 9, 21},
                           {17, 65, 31, 33}, {40, 30, 44, 34}, {100, 90, 12, 11}, {131, 43, 70, 130}};

double filter_at(double x, ImageFilter filter) {
  x = std::fabs(x);
  if (filter == ImageFilter::bilinear) return std::max(0.0, 1 - x);
  if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0;
}

// One axis in double, rounded to 8 bits: [outer][in][inner] to [outer][out][inner].
std::vector<uint8_t> resample(const std::vector<uint8_t>& source, int64_t outer, int64_t in, int64_t out, int64_t inner,
                              ImageFilter filter) {
  if (in == out) return source;
  std::vector<uint8_t> result(static_cast<size_t>(outer * out * inner));
  const double scale = static_cast<double>(in) / static_cast<double>(out), widen = std::max(scale, 1.0);
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t x = 0; x < out; ++x)
      for (int64_t c = 0; c < inner; ++c) {
        double sum = 0, total = 0;
        for (int64_t i = 0; i < in; ++i) {
          const double weight = filter_at((i + 0.5 - (x + 0.5) * scale) / widen, filter);
          total += weight;
          sum += weight * source[static_cast<size_t>((o * in + i) * inner + c)];
        }
        result[static_cast<size_t>((o * out + x) * inner + c)] =
            static_cast<uint8_t>(std::clamp(std::floor(sum / total + 0.5), 0.0, 255.0));
      }
  return result;
}

std::vector<uint8_t> expected_resize(const uint8_t* image, const Size& size, ImageFilter filter) {
  std::vector<uint8_t> pixels(image, image + size.in_height * size.in_width * 3);
  const int64_t rows_lost = size.in_height - size.height, columns_lost = size.in_width - size.width;
  if (rows_lost > 0 && rows_lost > 2 * columns_lost) {
    pixels = resample(pixels, 1, size.in_height, size.height, size.in_width * 3, filter);
    return resample(pixels, size.height, size.in_width, size.width, 3, filter);
  }
  pixels = resample(pixels, size.in_height, size.in_width, size.width, 3, filter);
  return resample(pixels, 1, size.in_height, size.height, size.width * 3, filter);
}

ImageArgs args_of(const GuardedBuffer<uint8_t>& image, const Size& size, ImageFilter filter) {
  ImageArgs args;
  args.image = image.data();
  args.row_stride = size.in_width * 3;
  args.in_height = size.in_height;
  args.in_width = size.in_width;
  args.height = size.height;
  args.width = size.width;
  args.filter = filter;
  return args;
}

void fill(GuardedBuffer<uint8_t>& image, Random& random) {
  for (int64_t i = 0; i < image.size(); ++i) image[i] = static_cast<uint8_t>(random.bits() >> 32);
}

void check_resize(const Size& size, ImageFilter filter, Edge edge) {
  Random random(static_cast<uint64_t>(size.in_height * 1000 + size.width));
  GuardedBuffer<uint8_t> image(size.in_height * size.in_width * 3, edge), out(size.height * size.width * 3, edge);
  fill(image, random);
  ImageArgs args = args_of(image, size, filter);
  args.out = out.data();
  args.out_stride = size.width * 3;
  image_resize(args);
  const std::vector<uint8_t> expected = expected_resize(image.data(), size, filter);
  // The fixed-point weights round apart from double near a half: a level in each pass.
  for (int64_t i = 0; i < out.size(); ++i) CHECK(std::abs(out[i] - expected[static_cast<size_t>(i)]) <= 2);
}

TEST(resize_of_odd_sizes) {
  for_each_isa([] {
    for (const Size& size : kSizes)
      for (const ImageFilter filter : {ImageFilter::bicubic, ImageFilter::bilinear})
        for (const Edge edge : {Edge::end, Edge::start}) check_resize(size, filter, edge);
  });
}

template <class T>
void check_patches(const Size& size, int64_t patch, int64_t merge, Edge edge) {
  Random random(static_cast<uint64_t>(patch));
  GuardedBuffer<uint8_t> image(size.in_height * size.in_width * 3, edge), pixels(size.height * size.width * 3, edge);
  GuardedBuffer<T> out(size.height * size.width * 3, edge);
  fill(image, random);
  ImageArgs args = args_of(image, size, ImageFilter::bicubic);
  args.out = pixels.data();
  args.out_stride = size.width * 3;
  image_resize(args);

  args.out = out.data();
  args.out_stride = 3 * patch * patch;
  args.dtype = dtype_of<T>();
  args.patch_size = patch;
  args.merge_size = merge;
  args.rescale = 1.0 / 255;
  for (int c = 0; c < 3; ++c) {
    args.mean[c] = 0.4f + 0.05f * static_cast<float>(c);
    args.std[c] = 0.25f + 0.01f * static_cast<float>(c);
  }
  image_patches(args);
  const int64_t block = patch * merge;
  for (int64_t y = 0; y < size.height; ++y)
    for (int64_t x = 0; x < size.width; ++x)
      for (int c = 0; c < 3; ++c) {
        const int64_t merged = y / block * (size.width / block) + x / block;
        const int64_t row = (merged * merge + y / patch % merge) * merge + x / patch % merge;
        const float level = static_cast<float>(pixels[(y * size.width + x) * 3 + c] * args.rescale);
        T expected;
        assign(expected, (level - args.mean[c]) / args.std[c]);
        CHECK(to_float(out[((row * 3 + c) * patch + y % patch) * patch + x % patch]) == to_float(expected));
      }
}

TEST(patches_of_odd_sizes) {
  for_each_isa([] {
    for (const Edge edge : {Edge::end, Edge::start}) {
      check_patches<bf16>({50, 70, 64, 96}, 16, 2, edge);
      check_patches<float>({33, 84, 56, 84}, 14, 2, edge);
      check_patches<bf16>({28, 28, 28, 28}, 14, 2, edge);
      check_patches<bf16>({9, 9, 10, 15}, 5, 1, edge);
      check_patches<float>({30, 30, 34, 51}, 17, 1, edge);
    }
  });
}

}  // namespace
}  // namespace tilewright::testing
