// Bands of a picture in terms of Vec and Bytes; each ISA file includes this after both.
#pragma once

#include "kernels/image/resample.h"

namespace tilewright {
namespace {

// Calls fn(frame, first_row, end_row, strip) for each band, with one strip per run of bands of a frame.
template <class Fn>
void for_each_band(const ImagePlan& plan, Scratch& scratch, int64_t band_begin, int64_t band_end, Fn fn) {
  while (band_begin < band_end) {
    const int64_t frame = band_begin / plan.bands_per_frame;
    const int64_t first_band = band_begin - frame * plan.bands_per_frame;
    const int64_t end_band = least(plan.bands_per_frame, first_band + band_end - band_begin);
    const int64_t end_row = least(plan.args.height, end_band * plan.band_rows);
    Strip strip(plan, scratch, frame, end_row);
    for (int64_t row = first_band * plan.band_rows; row < end_row; row += plan.band_rows)
      fn(frame, row, least(end_row, row + plan.band_rows), strip);
    band_begin += end_band - first_band;
  }
}

void resize_bands(const ImagePlan& plan, int64_t band_begin, int64_t band_end) {
  const ImageArgs& args = plan.args;
  Scratch scratch(plan, 0);
  for_each_band(plan, scratch, band_begin, band_end, [&](int64_t frame, int64_t begin, int64_t end, Strip& strip) {
    strip.cover_outputs(begin, end);
    for (int64_t y = begin; y < end; ++y) {
      uint8_t* out = static_cast<uint8_t*>(args.out) + frame * args.out_frame_stride + y * args.out_stride;
      strip.make_row(y, out);
    }
  });
}

// Writes one patch: lines [patch_size] of line_stride bytes, from the patch's first pixel, to
// [3][patch_size][patch_size] with channel_stride elements from a channel to the next.
template <class T>
void write_patch(const uint8_t* lines, int64_t line_stride, int64_t patch_size, int64_t channel_stride,
                 const Normalizer (&normalizers)[3], T* out) {
  for (int64_t y = 0; y < patch_size; ++y, lines += line_stride, out += patch_size) {
    for (int64_t x = 0; x < patch_size; x += Vec::kLanes) {
      const int64_t left = patch_size - x;
      // A last part shorter than a vector overlaps the one before it, which is cheaper than a partial store.
      const int64_t at = left < Vec::kLanes && patch_size >= Vec::kLanes ? patch_size - Vec::kLanes : x;
      Vec channels[3];
      load_pixels(lines + 3 * at, channels);
      for (int c = 0; c < 3; ++c) {
        const Vec value = normalizers[c](channels[c]);
        if (patch_size >= Vec::kLanes)
          value.store(out + c * channel_stride + at);
        else
          value.store(out + c * channel_stride + at, left);
      }
    }
  }
}

template <class T>
void patch_bands_of(const ImagePlan& plan, int64_t band_begin, int64_t band_end) {
  const ImageArgs& args = plan.args;
  const int64_t patch = args.patch_size, merge = args.merge_size, temporal = args.temporal_patch_size;
  const int64_t grid_width = args.width / patch, patches_per_frame = args.height / patch * grid_width;
  const Normalizer normalizers[3] = {{args, 0}, {args, 1}, {args, 2}};
  Scratch scratch(plan, patch);
  for_each_band(plan, scratch, band_begin, band_end, [&](int64_t frame, int64_t begin, int64_t end, Strip& strip) {
    strip.cover_outputs(begin, end);
    for (int64_t inner_row = 0; inner_row < merge; ++inner_row) {
      const int64_t first_line = begin + inner_row * patch;
      for (int64_t y = 0; y < patch; ++y) strip.make_row(first_line + y, scratch.line(y));
      const int64_t band_patch = frame / temporal * patches_per_frame + begin / patch * grid_width;
      for (int64_t column = 0; column < grid_width; ++column) {
        const int64_t row = band_patch + (column / merge * merge + inner_row) * merge + column % merge;
        T* out = static_cast<T*>(args.out) + row * args.out_stride + frame % temporal * patch * patch;
        write_patch(scratch.line(0) + 3 * column * patch, scratch.line_stride, patch, temporal * patch * patch,
                    normalizers, out);
      }
    }
  });
}

void patch_bands(const ImagePlan& plan, int64_t band_begin, int64_t band_end) {
  if (plan.args.dtype == DType::bf16)
    patch_bands_of<bf16>(plan, band_begin, band_end);
  else
    patch_bands_of<float>(plan, band_begin, band_end);
}

}  // namespace
}  // namespace tilewright
