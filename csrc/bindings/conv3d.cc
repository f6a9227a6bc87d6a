#include "kernels/conv3d/conv3d.h"

#include "bindings/packed.h"
#include "bindings/tensor.h"

#include <nanobind/stl/tuple.h>

namespace tilewright {
namespace {

using Triple = std::tuple<int64_t, int64_t, int64_t>;  // frames, rows, columns

Size3d size_of(const Triple& triple) { return {std::get<0>(triple), std::get<1>(triple), std::get<2>(triple)}; }

// [B, T, H, W, C]
Frames frames_of(const Tensor& x) {
  if (!x) return {};
  return {x.data, x.stride(0), x.stride(1), x.stride(2), x.stride(3), x.size(1)};
}

std::string to_string(const Size3d& size) {
  return "[" + std::to_string(size.frames) + ", " + std::to_string(size.rows) + ", " + std::to_string(size.columns) +
         "]";
}

}  // namespace

void bind_conv3d(nb::module_& m) {
  using namespace nb::literals;
  m.def("conv3d_depth", [](int64_t channels, const Triple& kernel) { return conv3d_depth(channels, size_of(kernel)); });
  m.def(
      "conv3d",
      [](nb::handle x_arg, nb::handle previous_arg, const nb::tuple& packed, nb::handle bias_arg,
         nb::handle residual_arg, nb::handle norm_arg, nb::handle y_arg, const Triple& kernel, const Triple& stride,
         const Triple& before, bool doubled, const std::string& activation, const std::string& norm_activation) {
        Op op("conv3d");
        const Tensor x = op.tensor(x_arg, "x", {"B", "T", "H", "W", "C"}, kFloats);
        const Tensor previous = op.optional(previous_arg, "previous", {"B", "_", "H", "W", "C"}, kFloats);
        const PackedWeight weight = packed_of(op, packed, "weight", {"_"});
        OP_REQUIRE(op, !is_quantized(weight.format),
                   std::string("the weight is ") + name_of(weight.format) + ", expected float32 or bfloat16");
        OP_REQUIRE(op, weight.layout == WeightLayout::tiles,
                   std::string("the weight's layout is '") + name_of(weight.layout) + "', expected '" +
                       name_of(WeightLayout::tiles) + "'");
        op.bind("O", weight.n);
        op.bind("padded", weight.num_strips() * kStripColumns);
        const Tensor bias = op.optional(bias_arg, "bias", {"padded"}, one_of({DType::f32}));
        const Tensor y = op.tensor(y_arg, "out", {"B", "T'", "H'", "W'", "O"}, kFloats);
        const Tensor residual = op.optional(residual_arg, "residual", {"B", "T'", "H'", "W'", "O"}, kFloats);
        op.bind("rows", 3);
        const Tensor norm = op.optional(norm_arg, "norm", {"B", "rows", "C"}, one_of({DType::f32}));
        OP_REQUIRE(op, !norm || (norm.stride(1) == norm.size(2) && norm.stride(0) == 3 * norm.size(2)),
                   "norm is " + to_string(norm) + " with gaps, expected it contiguous");
        if (previous) op.same_dtype(x, previous);
        if (residual) op.same_dtype(y, residual);

        Conv3dArgs args;
        args.x = frames_of(x);
        args.previous = frames_of(previous);
        args.batch = op["B"];
        args.channels = op["C"];
        args.height = op["H"];
        args.width = op["W"];
        args.doubled = doubled;
        args.kernel = size_of(kernel);
        args.stride = size_of(stride);
        args.out = {op["T'"], op["H'"], op["W'"]};
        std::tie(args.front, args.top, args.left) = before;
        const auto positive = [](const Size3d& size) { return size.frames > 0 && size.rows > 0 && size.columns > 0; };
        OP_REQUIRE(op, positive(args.kernel), "kernel is " + to_string(args.kernel) + ", expected 1 or more of each");
        OP_REQUIRE(op, positive(args.stride), "stride is " + to_string(args.stride) + ", expected 1 or more of each");
        OP_REQUIRE(op, args.front >= 0 && args.top >= 0 && args.left >= 0, "padding is negative");
        OP_REQUIRE(op, !weight.gated && weight.k == conv3d_depth(args.channels, args.kernel),
                   "weight is " + to_string(weight) + ", expected [O, " +
                       std::to_string(conv3d_depth(args.channels, args.kernel)) + "] for " +
                       std::to_string(args.channels) + " channels and a kernel of " + to_string(args.kernel));
        // Rows and columns past the end of x are zeros; frames must exist.
        const int64_t frames_read = (args.out.frames - 1) * args.stride.frames + args.kernel.frames;
        OP_REQUIRE(op, frames_read <= op["T"] + args.front,
                   "out has " + std::to_string(args.out.frames) + " frames, which need " + std::to_string(frames_read) +
                       " of x and before it, there are " + std::to_string(op["T"] + args.front));
        OP_REQUIRE(op, x.data != y.data || x.numel() == 0, "out is x, expected other memory");
        args.product.x.dtype = x.dtype;
        args.product.weight = weight;
        args.product.bias = bias.as<float>();
        args.y = frames_of(y);
        args.residual = frames_of(residual);
        args.norm = norm.as<float>();
        args.norm_activation = activation_named(op, norm_activation);
        args.product.y.dtype = y.dtype;
        args.product.m = op.num_rows(y);
        args.product.activation = activation_named(op, activation);
        launch(conv3d, args);
      },
      "x"_a, "previous"_a.none(), "packed"_a, "bias"_a.none(), "residual"_a.none(), "norm"_a.none(), "out"_a,
      "kernel"_a, "stride"_a, "before"_a, "doubled"_a, "activation"_a, "norm_activation"_a);
}

}  // namespace tilewright
