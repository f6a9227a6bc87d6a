// Picture preprocessing in one pass: 8-bit RGB in, resized RGB or normalised patches out.
//
//   resize   Pillow's antialiased resampling, bit for bit: two passes, each rounded and clipped to 8 bits; a pass whose
//            size does not change is skipped. Weights are fixed point with 22 fraction bits. The horizontal pass comes
//            first, unless the picture loses more than twice as many rows as columns: Pillow 13 then turns the order
//            around (before 13 it never did; on noise the two differ by up to 10 levels).
//   patches  the resized pixel v becomes (v * rescale - mean[c]) / std[c] in fp32, each step rounded as numpy rounds
//            it, and lands at
//              row      (t, y / (P M), x / (P M), y / P % M, x / P % M)    t = frame / Tp, M = merge, P = patch
//              element  (c, frame % Tp, y % P, x % P)
//            rounded once to bf16 where that is the output. A still is one frame with Tp = 1.
//
// A band is the output of one task: the output rows of one row of merged patches. The source rows that a band needs are
// resized horizontally into a strip in the thread's scratch, so no whole intermediate picture exists.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace tilewright {

enum class ImageFilter : int { bilinear, bicubic };

// Weights of an axis: each output position is a weighted sum of source positions.
struct AxisWeights {
  int64_t in_size = 0, out_size = 0;
  int64_t max_pairs = 0;
  const int32_t* begin = nullptr;     // [out_size] first source position
  const int32_t* num_taps = nullptr;  // [out_size]
  // [out_size][max_pairs][4]: for taps 2j and 2j+1 the high parts, then the low parts: weight = high * 2048 + low with
  // low in [0, 2047], so that both fit a 16-bit multiply-add and the sum stays exact.
  const int16_t* pairs = nullptr;

  bool identity() const { return in_size == out_size; }
  int64_t end(int64_t position) const { return begin[position] + num_taps[position]; }
};

inline constexpr int kWeightLowBits = 11;

struct ImageArgs {
  const uint8_t* image = nullptr;            // [frames, in_height, in_width, 3]
  int64_t frame_stride = 0, row_stride = 0;  // in bytes
  int64_t frames = 1, in_height = 0, in_width = 0;
  int64_t height = 0, width = 0;
  ImageFilter filter = ImageFilter::bicubic;

  // resize: uint8 [frames, height, width, 3]; patches: rows of out_stride elements. resize uses out_frame_stride too.
  void* out = nullptr;
  int64_t out_frame_stride = 0, out_stride = 0;

  // patches only
  DType dtype = DType::f32;
  int64_t patch_size = 0, merge_size = 1, temporal_patch_size = 1;
  double rescale = 1;
  float mean[3] = {}, std[3] = {1, 1, 1};
};

// Values that image.cc computes once per call for the kernels.
struct ImagePlan {
  ImageArgs args;
  AxisWeights horizontal, vertical;
  int64_t band_rows = 0;  // output rows of a band
  int64_t bands_per_frame = 0;
  int64_t chunk_columns = 0;         // output columns of the horizontal pass at a time, a multiple of 16
  int64_t chunk_source_columns = 0;  // the most source columns a chunk needs
  bool vertical_first = false;
  int64_t strip_rows =
      0;  // the most rows a band needs of the horizontal pass: source rows, or output rows if vertical_first
};

void image_resize(const ImageArgs& args);
void image_patches(const ImageArgs& args);

// Processes bands [begin, end) of all frames, counted frame by frame.
struct ImageKernels {
  void (*resize)(const ImagePlan& plan, int64_t band_begin, int64_t band_end);
  void (*patches)(const ImagePlan& plan, int64_t band_begin, int64_t band_end);
  int vector_bytes;
};

}  // namespace tilewright
