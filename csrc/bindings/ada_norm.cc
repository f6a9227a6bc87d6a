#include "kernels/ada_norm/ada_norm.h"

#include "bindings/tensor.h"

namespace tilewright {
namespace {

// A scale, shift or gate of x [B, L, C]: [B, C] or [B, 1, C] has a row for each sample, [B, L, C] for each token,
// [B, F, 1, C] for each of F frames of L / F tokens.
Modulation modulation_of(Op& op, nb::handle arg, const char* name) {
  const Tensor t = op.optional(arg, name, {"...", "C"}, kFloats);
  if (!t) return {};
  const int64_t batch = op["B"], length = op["L"];
  const int64_t rows = t.rank == 2 ? 1 : t.rank >= 3 ? t.size(1) : 0;
  const bool fits =
      (t.rank == 2 || (t.rank == 3 && (rows == 1 || rows == length)) || (t.rank == 4 && t.size(2) == 1)) &&
      t.size(0) == batch && (length == 0 || (rows > 0 && length % rows == 0));
  OP_REQUIRE(op, fits,
             std::string(name) + " is " + to_string(t) + ", expected [B, C], [B, L, C] or [B, F, 1, C] for x with B=" +
                 std::to_string(batch) + ", L=" + std::to_string(length) + ", C=" + std::to_string(op["C"]));
  return {op.rows(t), rows ? length / rows : 1};
}

// Arguments that both functions share.
AdaNormArgs rows_of(Op& op, nb::handle x_arg, nb::handle residual_arg, nb::handle gate_arg, nb::handle y_arg) {
  const Tensor x = op.tensor(x_arg, "x", {"B", "L", "C"}, kFloats);
  const Tensor residual = op.optional(residual_arg, "residual", {"B", "L", "C"}, kFloats);
  const Tensor y = op.tensor(y_arg, "out", {"B", "L", "C"}, kFloats);
  op.same_dtype(x, y);
  if (residual) op.same_dtype(x, residual);
  AdaNormArgs args;
  args.x = op.rows(x);
  args.residual = op.rows(residual);
  args.y = op.rows(y);
  args.gate = modulation_of(op, gate_arg, "gate");
  args.num_rows = op.num_rows(x);
  args.width = op["C"];
  return args;
}

}  // namespace

void bind_ada_norm(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "ada_norm",
      [](nb::handle x_arg, nb::handle scale_arg, nb::handle shift_arg, nb::handle weight_arg, nb::handle bias_arg,
         nb::handle residual_arg, nb::handle gate_arg, nb::handle y_arg, float eps, float constant, bool is_rms) {
        Op op(is_rms ? "ada_rms_norm" : "ada_layer_norm");
        AdaNormArgs args = rows_of(op, x_arg, residual_arg, gate_arg, y_arg);
        OP_REQUIRE(op, args.residual || !args.gate.rows, "there is a gate, expected a residual beside it");
        OP_REQUIRE(op, !args.residual || args.residual.data != args.y.data,
                   "out is the residual, expected other memory");
        args.scale = modulation_of(op, scale_arg, "scale");
        args.shift = modulation_of(op, shift_arg, "shift");
        args.weight = op.rows(op.optional(weight_arg, "weight", {"C"}, kFloats));
        args.bias = op.rows(op.optional(bias_arg, "bias", {"C"}, kFloats));
        args.eps = eps;
        args.constant = constant;
        args.is_rms = is_rms;
        launch(ada_norm, args);
      },
      "x"_a, "scale"_a.none(), "shift"_a.none(), "weight"_a.none(), "bias"_a.none(), "residual"_a.none(),
      "gate"_a.none(), "out"_a, "eps"_a, "constant"_a, "is_rms"_a);
  m.def(
      "gated_add",
      [](nb::handle residual_arg, nb::handle x_arg, nb::handle gate_arg, nb::handle y_arg) {
        Op op("gated_add");
        launch(gated_add, rows_of(op, x_arg, residual_arg, gate_arg, y_arg));
      },
      "residual"_a, "x"_a, "gate"_a, "out"_a);
}

}  // namespace tilewright
