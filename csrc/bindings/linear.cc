#include "kernels/linear/linear.h"

#include "bindings/tensor.h"

namespace tilewright {
namespace {

void check_packed(const Op& op, const Tensor& packed, int64_t n, int64_t k, bool gated) {
  OP_REQUIRE(op, n > 0 && k > 0,
             "a packed weight of " + std::to_string(n) + " x " + std::to_string(k) + " has no elements");
  OP_REQUIRE(op, !gated || n % 2 == 0, "a gate|up weight has an even number of rows, got " + std::to_string(n));
  OP_REQUIRE(op, packed.numel() == packed_elements(n, k, gated),
             "packed weight has " + std::to_string(packed.numel()) + " elements, expected " +
                 std::to_string(packed_elements(n, k, gated)) + " for " + std::to_string(n) + " x " +
                 std::to_string(k));
}

PackArgs pack_args(const Op& op, const Tensor& weight, const Tensor& packed, bool gated) {
  check_packed(op, packed, weight.size(0), weight.size(1), gated);
  return {weight.data,  op.row_stride(weight), weight.dtype,   packed.data,
          packed.dtype, weight.size(0),        weight.size(1), gated};
}

}  // namespace

void bind_linear(nb::module_& m) {
  using namespace nb::literals;
  m.def("packed_elements", &packed_elements);
  m.def("packed_layout", [] { return linear_kernels().layout; });
  m.def("pack_weight", [](nb::handle weight, nb::handle packed, bool gated) {
    Op op("pack_weight");
    const Tensor w = op.tensor(weight, "weight", {"N", "K"}, kFloats);
    launch(pack_weight, pack_args(op, w, op.tensor(packed, "packed", {"_"}, kFloats), gated));
  });
  m.def("unpack_weight", [](nb::handle packed, nb::handle weight, bool gated) {
    Op op("unpack_weight");
    const Tensor w = op.tensor(weight, "weight", {"N", "K"}, kFloats);
    launch(unpack_weight, pack_args(op, w, op.tensor(packed, "packed", {"_"}, kFloats), gated));
  });

  m.def(
      "linear",
      [](nb::handle x_arg, nb::handle packed_arg, int64_t n, int64_t k, bool gated, nb::handle bias_arg,
         nb::handle residual_arg, nb::handle y_arg, const std::string& activation) {
        Op op("linear");
        op.bind("K", k);
        op.bind("N", gated ? n / 2 : n);
        op.bind("padded", packed_elements(n, 1, gated) / kTileDepth);
        const Tensor x = op.tensor(x_arg, "x", {"...", "K"}, kFloats);
        const Tensor packed = op.tensor(packed_arg, "packed weight", {"_"}, kFloats);
        check_packed(op, packed, n, k, gated);
        const Tensor bias = op.optional(bias_arg, "bias", {"padded"}, one_of({DType::f32}));
        const Tensor residual = op.optional(residual_arg, "residual", {"...", "N"}, kFloats);
        const Tensor y = op.tensor(y_arg, "out", {"...", "N"}, kFloats);
        const int64_t rows = op.num_rows(x);
        OP_REQUIRE(op, op.num_rows(y) == rows, "out is " + to_string(y) + ", expected the rows of x, " + to_string(x));
        if (residual) {
          op.same_dtype(y, residual);
          OP_REQUIRE(op, op.num_rows(residual) == rows,
                     "residual is " + to_string(residual) + ", expected the shape of out");
        }
        LinearArgs args;
        args.x = x.data;
        args.x_stride = op.row_stride(x);
        args.x_dtype = x.dtype;
        args.weight = packed.data;
        args.weight_dtype = packed.dtype;
        args.bias = static_cast<const float*>(bias.data);
        args.residual = residual.data;
        args.residual_stride = residual ? op.row_stride(residual) : 0;
        args.y = y.data;
        args.y_stride = op.row_stride(y);
        args.y_dtype = y.dtype;
        args.m = rows;
        args.n = n;
        args.k = k;
        args.gated = gated;
        args.activation = activation_named(op, activation);
        launch(linear, args);
      },
      "x"_a, "packed"_a, "n"_a, "k"_a, "gated"_a, "bias"_a.none(), "residual"_a.none(), "out"_a, "activation"_a);
}

}  // namespace tilewright
