#include "kernels/norm/norm.h"

#include "bindings/tensor.h"

namespace tilewright {
namespace {

// x, y, residual and gate are [..., H, D] or, with one head, [..., D].
NormRows rows_of(const Op& op, const Tensor& t, bool per_head) {
  if (!t) return {};
  const int inner = per_head ? 2 : 1;
  return {t.data, op.row_stride(t, inner), per_head ? t.stride(-2) : 0};
}

}  // namespace

void bind_norm(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "rms_norm",
      [](nb::handle x_arg, nb::handle weight_arg, nb::handle residual_arg, nb::handle gate_arg, nb::handle y_arg,
         float eps, bool weight_plus_one) {
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
        const bool per_head = x.rank >= 3;
        NormArgs args;
        args.x = rows_of(op, x, per_head);
        args.y = rows_of(op, y, per_head);
        args.residual = rows_of(op, residual, per_head);
        args.gate = rows_of(op, gate, per_head);
        args.weight = weight.data;
        args.inner = per_head ? x.size(-2) : 1;
        args.outer = args.inner ? op.num_rows(x) / args.inner : 0;
        args.width = op["D"];
        args.eps = eps;
        args.weight_plus_one = weight_plus_one;
        args.dtype = x.dtype;
        args.weight_dtype = weight.dtype;
        launch(rms_norm, args);
      },
      "x"_a, "weight"_a, "residual"_a.none(), "gate"_a.none(), "out"_a, "eps"_a, "weight_plus_one"_a);

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
        args.x = rows_of(op, x, false);
        args.y = rows_of(op, y, false);
        args.weight = weight.data;
        args.bias = bias.data;
        args.outer = op.num_rows(x);
        args.width = op["D"];
        args.eps = eps;
        args.dtype = x.dtype;
        args.weight_dtype = weight.dtype;
        launch(layer_norm, args);
      },
      "x"_a, "weight"_a, "bias"_a.none(), "out"_a, "eps"_a);
}

}  // namespace tilewright
