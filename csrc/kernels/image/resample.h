// The two resampling passes in terms of Bytes.
//
// Both are one inner loop, a weighted sum of vectors of bytes. Vertically the vectors are pieces of rows. Horizontally
// Bytes::kCount rows are transposed first (a byte transpose, a tenth of the pass), so that each channel of each pixel
// is one vector over the rows, and transposed back after: no lane is idle and no sum runs across lanes.
#pragma once

#include <cstring>

#include "base/scratch.h"
#include "base/tile.h"
#include "kernels/image/image.h"

namespace tilewright {
namespace {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Whole vectors, and one more that a load starting inside the row may touch.
inline int64_t padded(int64_t bytes) { return round_up(bytes, 64) + 64; }

// The thread's memory for one call.
struct Scratch {
  uint8_t *strip, *sideways, *result, *tall, *lines;
  int64_t line_stride, tall_stride;

  Scratch(const ImagePlan& plan, int64_t num_lines)
      : line_stride(padded(3 * plan.args.width)), tall_stride(padded(3 * plan.args.in_width)) {
    const bool horizontal = !plan.horizontal.identity();
    const int64_t strip_bytes = horizontal ? (plan.strip_rows + Bytes::kCount) * line_stride : 0;
    const int64_t sideways_bytes = horizontal ? padded(3 * plan.chunk_source_columns) * Bytes::kCount : 0;
    const int64_t result_bytes = horizontal ? 3 * plan.chunk_columns * Bytes::kCount : 0;
    const int64_t tall_bytes = horizontal && plan.vertical_first ? Bytes::kCount * tall_stride : 0;
    const int64_t total = strip_bytes + sideways_bytes + result_bytes + tall_bytes + num_lines * line_stride;
    strip = static_cast<uint8_t*>(thread_scratch(static_cast<size_t>(total)));
    sideways = strip + strip_bytes;
    result = sideways + sideways_bytes;
    tall = result + result_bytes;
    lines = tall + tall_bytes;
  }
  uint8_t* line(int64_t i) const { return lines + i * line_stride; }
};

// Returns the weighted sum of vectors tap_stride bytes apart. With kWhole all of each vector is read, else `count`
// bytes.
template <bool kWhole>
inline Bytes weighted_sum(const uint8_t* taps, int64_t tap_stride, int num_taps, const int16_t* pairs, int64_t count) {
  const auto load = [&](int tap) {
    return kWhole ? Bytes::load(taps + tap * tap_stride) : Bytes::load(taps + tap * tap_stride, count);
  };
  WeightedSum sum;
  int tap = 0;
  for (; tap + 2 <= num_taps; tap += 2, pairs += 4) sum.add(load(tap), load(tap + 1), pairs);
  if (tap < num_taps) {
    const Bytes last = load(tap);
    sum.add(last, last, pairs);  // the second weight is zero
  }
  return sum.result();
}

// Computes output row y of the vertical pass over `bytes` bytes; `rows` points to source row `first`.
inline void sum_rows(const AxisWeights& vertical, int64_t y, const uint8_t* rows, int64_t stride, int64_t first,
                     int64_t bytes, uint8_t* out) {
  const uint8_t* taps = rows + (vertical.begin[y] - first) * stride;
  const int num_taps = vertical.num_taps[y];
  const int16_t* pairs = vertical.pairs + y * vertical.max_pairs * 4;
  int64_t x = 0;
  for (; x + Bytes::kCount <= bytes; x += Bytes::kCount)
    weighted_sum<true>(taps + x, stride, num_taps, pairs, Bytes::kCount).store(out + x);
  if (x < bytes) weighted_sum<false>(taps + x, stride, num_taps, pairs, bytes - x).store(out + x, bytes - x);
}

// Rows of one frame after the horizontal pass: a window that slides down, or the source if there is no such pass. If
// the vertical pass comes first they are output rows, else source rows.
class Strip {
 public:
  // For output rows below end_output.
  Strip(const ImagePlan& plan, const Scratch& scratch, int64_t frame, int64_t end_output)
      : plan_(plan), scratch_(scratch), frame_(plan.args.image + frame * plan.args.frame_stride) {
    rows_ = scratch.strip;
    stride_ = scratch.line_stride;
    vertical_done_ = plan.vertical.identity() || plan.vertical_first;
    if (plan.horizontal.identity()) {
      rows_ = frame_;
      stride_ = plan.args.row_stride;
      vertical_done_ = plan.vertical.identity();
    }
    limit_ = end_of(end_output - 1);
  }

  // Computes the rows that output rows [begin, end) need; begin never decreases.
  void cover_outputs(int64_t begin, int64_t end) {
    if (plan_.horizontal.identity()) return;
    const int64_t first = vertical_done_ ? begin : plan_.vertical.begin[begin];
    const int64_t last = end_of(end - 1);
    if (first >= end_) {
      end_ = first;
    } else {
      std::memmove(scratch_.strip, scratch_.strip + (first - first_) * stride_,
                   static_cast<size_t>((end_ - first) * stride_));
    }
    first_ = first;
    while (end_ < last) {
      const int64_t count = least(Bytes::kCount, limit_ - end_);
      uint8_t* out = scratch_.strip + (end_ - first_) * stride_;
      if (plan_.vertical_first) {
        for (int64_t i = 0; i < count; ++i)
          sum_rows(plan_.vertical, end_ + i, frame_, plan_.args.row_stride, 0, 3 * plan_.args.in_width,
                   scratch_.tall + i * scratch_.tall_stride);
        resize_rows(scratch_.tall, scratch_.tall_stride, count, out);
      } else {
        resize_rows(frame_ + end_ * plan_.args.row_stride, plan_.args.row_stride, count, out);
      }
      end_ += count;
    }
  }

  // Computes output row y into the 3 * width bytes of `out`.
  void make_row(int64_t y, uint8_t* out) const {
    const int64_t bytes = 3 * plan_.args.width;
    if (vertical_done_)
      std::memcpy(out, rows_ + (y - first_) * stride_, static_cast<size_t>(bytes));
    else
      sum_rows(plan_.vertical, y, rows_, stride_, first_, bytes, out);
  }

 private:
  // Returns the row after the last that output row y needs.
  int64_t end_of(int64_t y) const { return vertical_done_ ? y + 1 : plan_.vertical.end(y); }

  // Runs the horizontal pass over `count` rows, at most Bytes::kCount.
  void resize_rows(const uint8_t* source, int64_t source_stride, int64_t count, uint8_t* out) const {
    const AxisWeights& weights = plan_.horizontal;
    for (int64_t x = 0; x < weights.out_size; x += plan_.chunk_columns) {
      const int64_t end = least(weights.out_size, x + plan_.chunk_columns);
      const int64_t source_begin = weights.begin[x];
      turn_source(source, source_stride, count, 3 * source_begin, 3 * weights.end(end - 1));
      uint8_t* result = scratch_.result;
      for (int64_t column = x; column < end; ++column) {
        const uint8_t* taps = scratch_.sideways + (weights.begin[column] - source_begin) * 3 * Bytes::kCount;
        const int16_t* pairs = weights.pairs + column * weights.max_pairs * 4;
        for (int c = 0; c < 3; ++c, taps += Bytes::kCount, result += Bytes::kCount)
          weighted_sum<true>(taps, 3 * Bytes::kCount, weights.num_taps[column], pairs, Bytes::kCount).store(result);
      }
      turn_result(count, 3 * (end - x), out + 3 * x);
    }
  }

  // Transposes bytes [begin, end) of `count` rows into scratch.sideways[byte][row]. Rows past the last group of 16 are
  // not written: their results are never read.
  void turn_source(const uint8_t* source, int64_t source_stride, int64_t count, int64_t begin, int64_t end) const {
    const int64_t row_bytes = 3 * plan_.args.in_width;
    for (int64_t group = 0; group < count; group += 16, source += 16 * source_stride) {
      const int64_t last = count - group - 1;
      for (int64_t x = begin; x < end; x += Bytes::kCount) {
        Bytes block[16];
        for (int64_t i = 0; i < 16; ++i)
          block[i] = Bytes::load(source + least(i, last) * source_stride + x, row_bytes - x);
        transpose_groups(block);
        uint8_t* target = scratch_.sideways + (x - begin) * Bytes::kCount + group;
#pragma GCC unroll 4
        for (int lane = 0; lane < Bytes::kCount / 16; ++lane)
#pragma GCC unroll 16
          for (int i = 0; i < 16; ++i) block[i].store_group(target + (lane * 16 + i) * Bytes::kCount, lane);
      }
    }
  }

  // Transposes scratch.result[byte][row] into `count` rows of `bytes` bytes, rounded up to 16: the strip's rows are
  // padded.
  void turn_result(int64_t count, int64_t bytes, uint8_t* out) const {
    for (int64_t x = 0; x < bytes; x += 16) {
      Bytes block[16];
      for (int64_t i = 0; i < 16; ++i) block[i] = Bytes::load(scratch_.result + (x + i) * Bytes::kCount);
      transpose_groups(block);
      for (int lane = 0; lane < Bytes::kCount / 16; ++lane)
        for (int64_t i = 0; i < 16 && lane * 16 + i < count; ++i)
          block[i].store_group(out + (lane * 16 + i) * stride_ + x, lane);
    }
  }

  const ImagePlan& plan_;
  const Scratch& scratch_;
  const uint8_t* frame_;
  const uint8_t* rows_;  // row first_
  int64_t stride_;
  bool vertical_done_;           // the rows are output rows
  int64_t first_ = 0, end_ = 0;  // rows present
  int64_t limit_;                // rows needed in all
};

}  // namespace
}  // namespace tilewright
