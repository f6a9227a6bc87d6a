#include "kernels/group_norm/group_norm.h"

#include "bindings/tensor.h"

namespace tilewright {

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
        OP_REQUIRE(op, x.rank >= 2, "x is " + to_string(x) + ", expected items, any number of axes, and channels");
        OP_REQUIRE(op, y.rank == x.rank && y.size(0) == x.size(0) && op.num_rows(y) == op.num_rows(x),
                   "out is " + to_string(y) + ", expected the shape of x, " + to_string(x));
        OP_REQUIRE(op, groups >= 1 && op["C"] % groups == 0,
                   "groups is " + std::to_string(groups) + ", expected a divisor of the " + std::to_string(op["C"]) +
                       " channels");
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
}

}  // namespace tilewright
