#include "kernels/group_norm/group_norm.h"

#include "bindings/tensor.h"

namespace tilewright {
namespace {

void require_groups(Op& op, const Tensor& x, int64_t groups) {
  OP_REQUIRE(op, x.rank >= 2, "x is " + to_string(x) + ", expected items, any number of axes, and channels");
  OP_REQUIRE(
      op, groups >= 1 && op["C"] % groups == 0,
      "groups is " + std::to_string(groups) + ", expected a divisor of the " + std::to_string(op["C"]) + " channels");
}

}  // namespace

void bind_group_norm(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "group_norm",
      [](nb::handle x_arg, nb::handle weight_arg, nb::handle bias_arg, nb::handle y_arg, int64_t groups, float eps,
         const std::string& activation) {
        Op op("group_norm");
        const Tensor x = op.tensor(x_arg, "x", {"...", "C"}, kFloats);
        const Tensor weight = op.optional(weight_arg, "weight", {"C"}, kFloats);
        const Tensor bias = op.optional(bias_arg, "bias", {"C"}, kFloats);
        const Tensor y = op.tensor(y_arg, "out", {"...", "C"}, kFloats);
        op.same_dtype(x, y);
        if (weight && bias) op.same_dtype(weight, bias);
        require_groups(op, x, groups);
        OP_REQUIRE(op, y.rank == x.rank && y.size(0) == x.size(0) && op.num_rows(y) == op.num_rows(x),
                   "out is " + to_string(y) + ", expected the shape of x, " + to_string(x));
        GroupNormArgs args;
        args.x = op.rows(x);
        args.y = op.rows(y);
        args.weight = weight.data;
        args.bias = bias.data;
        args.weight_dtype = weight ? weight.dtype : bias.dtype;
        args.batch = x.size(0);
        args.pixels = args.batch ? op.num_rows(x) / args.batch : 0;
        args.channels = op["C"];
        args.groups = groups;
        args.eps = eps;
        args.activation = activation_named(op, activation);
        launch(group_norm, args);
      },
      "x"_a, "weight"_a.none(), "bias"_a.none(), "out"_a, "groups"_a, "eps"_a, "activation"_a);
  m.def(
      "group_statistics",
      [](nb::handle x_arg, nb::handle out_arg, int64_t groups) {
        Op op("group_statistics");
        const Tensor x = op.tensor(x_arg, "x", {"...", "C"}, kFloats);
        require_groups(op, x, groups);
        op.bind("B", x.size(0));
        op.bind("G", groups);
        op.bind("values", 2);
        const Tensor out = op.tensor(out_arg, "out", {"B", "G", "values"}, one_of({DType::f32}));
        OP_REQUIRE(op, out.numel() == 0 || (out.stride(1) == 2 && out.stride(0) == 2 * groups),
                   "out is " + to_string(out) + " with gaps, expected it contiguous");
        GroupStatisticsArgs args;
        args.norm.x = op.rows(x);
        args.norm.batch = x.size(0);
        args.norm.pixels = args.norm.batch ? op.num_rows(x) / args.norm.batch : 0;
        args.norm.channels = op["C"];
        args.norm.groups = groups;
        args.statistics = out.as<float>();
        OP_REQUIRE(op, args.norm.batch == 0 || args.norm.pixels > 0, "x is " + to_string(x) + ", expected some pixels");
        launch(group_statistics, args);
      },
      "x"_a, "out"_a, "groups"_a);
}

}  // namespace tilewright
