// Convolutions of every level against plain loops in double, at odd sizes, between guard pages.
#include "kernels/conv3d/conv3d.h"

#include <vector>

#include "testing/testing.h"

namespace tilewright::testing {
namespace {

struct Shape {
  int64_t channels, outputs;
  Size3d kernel, stride, in;
  int64_t previous, front, top, left, bottom, right;
  bool doubled;
};

constexpr Shape kShapes[] = {
    {3, 5, {1, 3, 3}, {1, 1, 1}, {1, 5, 6}, 0, 0, 1, 1, 1, 1, false},
    {33, 34, {1, 3, 3}, {1, 1, 1}, {1, 4, 15}, 0, 0, 1, 1, 1, 1, false},
    {40, 3, {1, 3, 3}, {1, 2, 2}, {1, 7, 6}, 0, 0, 0, 0, 1, 1, false},
    {33, 8, {1, 3, 3}, {1, 1, 1}, {1, 3, 3}, 0, 0, 1, 1, 1, 1, true},
    {7, 8, {2, 2, 3}, {1, 2, 1}, {2, 5, 5}, 1, 1, 1, 0, 0, 2, false},
    {36, 4, {3, 2, 1}, {2, 1, 3}, {3, 4, 5}, 1, 2, 0, 1, 1, 0, false},
    {65, 33, {1, 1, 1}, {1, 1, 1}, {2, 3, 3}, 0, 0, 0, 0, 0, 0, false},
};

template <class T>
double pixel_value(const Shape& shape, const GuardedBuffer<T>& x, const GuardedBuffer<T>& previous, const float* norm,
                   int64_t item, int64_t frame, int64_t row, int64_t column, int64_t channel) {
  const int64_t scale = shape.doubled ? 2 : 1;
  if (row < 0 || column < 0 || row >= shape.in.rows * scale || column >= shape.in.columns * scale) return 0;
  const bool before = frame < 0;
  const int64_t num_frames = before ? shape.previous : shape.in.frames;
  if (before) frame += shape.previous;
  if (frame < 0) return 0;
  const int64_t pixel = ((item * num_frames + frame) * shape.in.rows + row / scale) * shape.in.columns + column / scale;
  const double value = to_float((before ? previous : x)[pixel * shape.channels + channel]);
  if (!norm) return value;
  const float* table = norm + item * 3 * shape.channels + channel;
  return (value - table[0]) * table[shape.channels] + table[2 * shape.channels];
}

Frames frames_of(void* data, int64_t frames, const Shape& shape) {
  const int64_t row = shape.in.columns * shape.channels, frame = shape.in.rows * row;
  return {data, frames * frame, frame, row, shape.channels, frames};
}

template <class TX, class TW, class TY>
void check_conv3d(const Shape& shape, Edge edge, bool normed) {
  constexpr int64_t kBatch = 2;
  const Size3d &kernel = shape.kernel, &stride = shape.stride;
  const int64_t scale = shape.doubled ? 2 : 1, taps = kernel.count();
  const Size3d out = {(shape.in.frames + shape.front - kernel.frames) / stride.frames + 1,
                      (shape.in.rows * scale + shape.top + shape.bottom - kernel.rows) / stride.rows + 1,
                      (shape.in.columns * scale + shape.left + shape.right - kernel.columns) / stride.columns + 1};
  const int64_t depth = conv3d_depth(shape.channels, kernel), tap_depth = depth / taps;
  const int64_t pixels = kBatch * out.count(), frame_elements = shape.in.rows * shape.in.columns * shape.channels;
  PackedWeight form = {.format = kFormatOf<TW>, .n = shape.outputs, .k = depth};
  Random random(static_cast<uint64_t>(shape.channels));
  GuardedBuffer<TX> x(kBatch * shape.in.frames * frame_elements, edge),
      previous(kBatch * shape.previous * frame_elements);
  GuardedBuffer<TW> weight(shape.outputs * depth), packed(form.elements(), edge);
  GuardedBuffer<float> bias(form.num_strips() * kStripColumns, edge), norm(kBatch * 3 * shape.channels, edge);
  GuardedBuffer<TY> residual(pixels * shape.outputs, edge), y(pixels * shape.outputs, edge);
  x.fill(random);
  previous.fill(random);
  weight.fill(random);
  bias.fill(random);
  residual.fill(random);
  norm.fill(random);
  for (int64_t o = 0; o < shape.outputs; ++o)
    for (int64_t i = 0; i < depth; ++i)
      if (i % tap_depth >= shape.channels) assign(weight[o * depth + i], 0.0f);
  form.data = packed.data();
  pack_weight({rows_of(weight, depth), form});

  std::vector<double> expected;
  for (int64_t p = 0; p < pixels; ++p) {
    const int64_t column = p % out.columns, row = p / out.columns % out.rows;
    const int64_t frame = p / out.columns / out.rows % out.frames, item = p / out.count();
    for (int64_t o = 0; o < shape.outputs; ++o) {
      double sum = bias[o] + to_float(residual[p * shape.outputs + o]);
      for (int64_t tap = 0; tap < taps; ++tap) {
        const int64_t dx = tap % kernel.columns, dy = tap / kernel.columns % kernel.rows,
                      dt = tap / kernel.columns / kernel.rows;
        for (int64_t c = 0; c < shape.channels; ++c)
          sum += pixel_value(shape, x, previous, normed ? norm.data() : nullptr, item,
                             frame * stride.frames + dt - shape.front, row * stride.rows + dy - shape.top,
                             column * stride.columns + dx - shape.left, c) *
                 to_float(weight[o * depth + tap * tap_depth + c]);
      }
      expected.push_back(sum);
    }
  }

  Conv3dArgs args;
  args.x = frames_of(x.data(), shape.in.frames, shape);
  args.previous = frames_of(previous.data(), shape.previous, shape);
  args.batch = kBatch;
  args.channels = shape.channels;
  args.height = shape.in.rows;
  args.width = shape.in.columns;
  args.doubled = shape.doubled;
  args.kernel = kernel;
  args.stride = stride;
  args.out = out;
  args.front = shape.front;
  args.top = shape.top;
  args.left = shape.left;
  args.product.x.dtype = dtype_of<TX>();
  args.product.weight = form;
  args.product.bias = bias.data();
  const int64_t row = out.columns * shape.outputs, frame = out.rows * row;
  args.y = {y.data(), out.frames * frame, frame, row, shape.outputs, out.frames};
  args.residual = args.y;
  args.residual.data = residual.data();
  args.norm = normed ? norm.data() : nullptr;
  args.product.y.dtype = dtype_of<TY>();
  args.product.m = pixels;
  conv3d(args);
  // x enters bf16 products as bf16: after a norm it is rounded for them, some 300 numbers of about 1, each by up to
  // 2^-9.
  check_close(y.data(), expected.data(), pixels * shape.outputs, normed && sizeof(TW) == 2 ? 8e-2 : 2e-4,
              "conv3d of " + std::to_string(shape.channels) + " channels");
}

TEST(conv3d_matches_plain_loops) {
  for_each_isa([] {
    for (const Shape& shape : kShapes)
      for (bool normed : {false, true})
        for (Edge edge : {Edge::end, Edge::start}) {
          check_conv3d<float, float, float>(shape, edge, normed);
          check_conv3d<float, bf16, float>(shape, edge, normed);
          check_conv3d<bf16, float, bf16>(shape, edge, normed);
          check_conv3d<bf16, bf16, bf16>(shape, edge, normed);
        }
  });
}

}  // namespace
}  // namespace tilewright::testing
