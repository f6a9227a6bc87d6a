#include "kernels/image/image.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>

#include <array>

#include "bindings/tensor.h"

namespace tilewright {
namespace {

constexpr DTypes kPixels = one_of({DType::u8});

// The picture [H, W, 3] or [F, H, W, 3] and the target size.
ImageArgs source_of(Op& op, nb::handle image_arg, int64_t height, int64_t width, const std::string& filter) {
  const Tensor image = op.tensor(image_arg, "image", {"...", "H", "W", "3"}, kPixels);
  OP_REQUIRE(op, image.rank <= 4, "image is " + to_string(image) + ", expected [H, W, 3] or [F, H, W, 3]");
  OP_REQUIRE(op, image.stride(-2) == 3, "image has a gap between pixels: its last two axes must be contiguous");
  ImageArgs args;
  args.image = image.as<uint8_t>();
  args.frames = image.rank == 4 ? image.size(0) : 1;
  args.frame_stride = image.rank == 4 ? image.stride(0) : 0;
  args.row_stride = image.stride(-3);
  args.in_height = op["H"];
  args.in_width = op["W"];
  args.height = height;
  args.width = width;
  constexpr int64_t kMaxSide = int64_t{1} << 24;  // positions are 32-bit, and bytes of a row stay far from overflow
  for (const int64_t side : {args.in_height, args.in_width, height, width})
    OP_REQUIRE(op, side >= 1 && side <= kMaxSide,
               "resizing [" + std::to_string(args.in_height) + ", " + std::to_string(args.in_width) + "] to [" +
                   std::to_string(height) + ", " + std::to_string(width) + "]: every side must be 1 to 16777216");
  OP_REQUIRE(op, filter == "bicubic" || filter == "bilinear",
             "filter is '" + filter + "', expected 'bicubic' or 'bilinear'");
  args.filter = filter == "bicubic" ? ImageFilter::bicubic : ImageFilter::bilinear;
  return args;
}

void require_multiple(const Op& op, const char* name, int64_t value, const char* of, int64_t factor) {
  OP_REQUIRE(op, value % factor == 0,
             std::string(name) + " is " + std::to_string(value) + ", expected a multiple of " + of + " = " +
                 std::to_string(factor));
}

void bind_patches(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "image_patches",
      [](nb::handle image_arg, nb::handle out_arg, int64_t height, int64_t width, const std::string& filter,
         int64_t patch_size, int64_t merge_size, int64_t temporal_patch_size, double rescale,
         const std::array<float, 3>& mean, const std::array<float, 3>& std) {
        Op op("patches");
        ImageArgs args = source_of(op, image_arg, height, width, filter);
        const int64_t sizes[] = {patch_size, merge_size, temporal_patch_size};
        for (const int64_t size : sizes)
          OP_REQUIRE(op, size >= 1 && size <= 4096,
                     "patch_size, merge_size and temporal_patch_size are " + std::to_string(patch_size) + ", " +
                         std::to_string(merge_size) + ", " + std::to_string(temporal_patch_size) +
                         ": each must be 1 to 4096");
        require_multiple(op, "height", height, "patch_size * merge_size", patch_size * merge_size);
        require_multiple(op, "width", width, "patch_size * merge_size", patch_size * merge_size);
        require_multiple(op, "the number of frames", args.frames, "temporal_patch_size", temporal_patch_size);
        for (const float value : std) OP_REQUIRE(op, value != 0.0f, "std has a zero");
        const Tensor out = op.tensor(out_arg, "out", {"_", "_"}, kFloats);
        const int64_t rows = args.frames / temporal_patch_size * (height / patch_size) * (width / patch_size);
        const int64_t columns = 3 * temporal_patch_size * patch_size * patch_size;
        OP_REQUIRE(
            op, out.size(0) == rows && out.size(1) == columns,
            "out is " + to_string(out) + ", expected [" + std::to_string(rows) + ", " + std::to_string(columns) + "]");
        args.out = out.data;
        args.out_stride = out.stride(0);
        args.dtype = out.dtype;
        args.patch_size = patch_size;
        args.merge_size = merge_size;
        args.temporal_patch_size = temporal_patch_size;
        args.rescale = rescale;
        for (int c = 0; c < 3; ++c) {
          args.mean[c] = mean[c];
          args.std[c] = std[c];
        }
        launch(image_patches, args);
      },
      "image"_a, "out"_a, "height"_a, "width"_a, "filter"_a, "patch_size"_a, "merge_size"_a, "temporal_patch_size"_a,
      "rescale"_a, "mean"_a, "std"_a);
}

}  // namespace

void bind_image(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "image_resize",
      [](nb::handle image_arg, nb::handle out_arg, int64_t height, int64_t width, const std::string& filter) {
        Op op("resize");
        ImageArgs args = source_of(op, image_arg, height, width, filter);
        const Tensor out = op.tensor(out_arg, "out", {"...", "_", "_", "3"}, kPixels);
        OP_REQUIRE(op,
                   out.rank <= 4 && (out.rank == 4 ? out.size(0) : 1) == args.frames && out.size(-3) == height &&
                       out.size(-2) == width && out.stride(-2) == 3,
                   "out is " + to_string(out) + ", expected " + std::to_string(args.frames) + " frame(s) of [" +
                       std::to_string(height) + ", " + std::to_string(width) + ", 3] with contiguous rows");
        args.out = out.data;
        args.out_frame_stride = out.rank == 4 ? out.stride(0) : 0;
        args.out_stride = out.stride(-3);
        launch(image_resize, args);
      },
      "image"_a, "out"_a, "height"_a, "width"_a, "filter"_a);
  bind_patches(m);
}

}  // namespace tilewright
