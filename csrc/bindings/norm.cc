#include "kernels/norm/norm.h"

#include "bindings/tensor.h"

namespace tilewright {

void bind_norm(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "rms_norm",
      [](nb::handle x_arg, nb::handle weight_arg, nb::handle residual_arg, nb::handle gate_arg, nb::handle y_arg,
         float eps, bool weight_plus_one, const std::string& activation) {
        Op op("rms_norm");
        const Tensor x = op.tensor(x_arg, "x", {"...", "D"}, kFloats);
        const Tensor weight = op.tensor(weight_arg, "weight", {"D"}, kFloats);
        const Tensor residual = op.optional(residual_arg, "residual", {"...", "D"}, kFloats);
        const Tensor gate = op.optional(gate_arg, "gate", {"...", "D"}, kFloats);
        const Tensor y = op.tensor(y_arg, "out", {"...", "D"}, kFloats);
        for (const Tensor* t : {&residual, &gate, &y}) {
          if (!*t) continue;
          op.same_dtype(x, *t);
          OP_REQUIRE(op, t->rank == x.rank && op.num_rows(*t) == op.num_rows(x),
                     std::string(t->name) + " is " + to_string(*t) + ", expected the shape of x, " + to_string(x));
        }
        NormArgs args;
        args.x = op.heads(x);
        args.y = op.heads(y);
        args.residual = op.heads(residual);
        args.gate = op.heads(gate);
        args.weight = weight.data;
        args.inner = x.rank >= 3 ? x.size(-2) : 1;
        args.outer = args.inner ? op.num_rows(x) / args.inner : 0;
        args.width = op["D"];
        args.eps = eps;
        args.weight_plus_one = weight_plus_one;
        args.activation = activation_named(op, activation);
        args.weight_dtype = weight.dtype;
        launch(rms_norm, args);
      },
      "x"_a, "weight"_a, "residual"_a.none(), "gate"_a.none(), "out"_a, "eps"_a, "weight_plus_one"_a, "activation"_a);

  m.def(
      "layer_norm",
      [](nb::handle x_arg, nb::handle weight_arg, nb::handle bias_arg, nb::handle y_arg, float eps) {
        Op op("layer_norm");
        const Tensor x = op.tensor(x_arg, "x", {"...", "D"}, kFloats);
        const Tensor weight = op.tensor(weight_arg, "weight", {"D"}, kFloats);
        const Tensor bias = op.optional(bias_arg, "bias", {"D"}, kFloats);
        const Tensor y = op.tensor(y_arg, "out", {"...", "D"}, kFloats);
        op.same_dtype(x, y);
        if (bias) op.same_dtype(weight, bias);
        OP_REQUIRE(op, op.num_rows(y) == op.num_rows(x), "out is " + to_string(y) + ", expected the shape of x");
        NormArgs args;
        args.x = {x.data, op.row_stride(x), 0, x.dtype};
        args.y = {y.data, op.row_stride(y), 0, y.dtype};
        args.weight = weight.data;
        args.bias = bias.data;
        args.outer = op.num_rows(x);
        args.width = op["D"];
        args.eps = eps;
        args.weight_dtype = weight.dtype;
        launch(layer_norm, args);
      },
      "x"_a, "weight"_a, "bias"_a.none(), "out"_a, "eps"_a);
}

}  // namespace tilewright
