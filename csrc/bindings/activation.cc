#include "kernels/activation/activation.h"

#include "bindings/tensor.h"

namespace tilewright {
namespace {

void same_shape(const Op& op, const Tensor& x, const Tensor& t) {
  bool same = t.rank == x.rank;
  for (int i = 0; same && i < x.rank; ++i) same = t.shape[i] == x.shape[i];
  OP_REQUIRE(op, same, std::string(t.name) + " is " + to_string(t) + ", expected the shape of x, " + to_string(x));
}

bool is_dense(const Tensor& t) {
  int64_t expected = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    if (t.strides[i] != expected && t.shape[i] != 1) return false;
    expected *= t.shape[i];
  }
  return true;
}

// Rows of same-shaped tensors; one long row if none has gaps.
void set_rows(const Op& op, ElementwiseArgs& args, const Tensor& x, const Tensor& other, const Tensor& y) {
  if (is_dense(x) && is_dense(y) && (!other || is_dense(other))) {
    args.x = {x.data, 0, x.dtype};
    args.y = {y.data, 0, y.dtype};
    args.other = {other.data, 0, other.dtype};
    args.rows = 1;
    args.width = x.numel();
    return;
  }
  args.rows = op.num_rows(x);
  args.width = x.size(-1);
  args.x = op.rows(x);
  args.y = op.rows(y);
  args.other = op.rows(other);
}

void sigmoid_gate_entry(nb::handle x_arg, nb::handle gate_arg, nb::handle y_arg) {
  Op op("sigmoid_gate");
  const Tensor x = op.tensor(x_arg, "x", {"...", "K"}, kFloats);
  const Tensor gate = op.tensor(gate_arg, "gate", {"...", "_"}, kFloats);
  const Tensor y = op.tensor(y_arg, "out", {"...", "K"}, kFloats);
  op.same_dtype(x, y);
  same_shape(op, x, y);
  bool fits = gate.rank == x.rank && (gate.size(-1) == 1 || gate.size(-1) == op["K"]);
  for (int i = 0; fits && i < x.rank - 1; ++i) fits = gate.shape[i] == x.shape[i];
  OP_REQUIRE(op, fits, "gate is " + to_string(gate) + ", expected the shape of x, " + to_string(x) + ", or 1 per row");
  SigmoidGateArgs args;
  args.x = op.heads(x);
  args.gate = op.heads(gate);
  args.y = op.heads(y);
  args.inner = x.rank >= 3 ? x.size(-2) : 1;
  args.outer = args.inner ? op.num_rows(x) / args.inner : 0;
  args.width = op["K"];
  args.one_per_row = gate.size(-1) == 1;
  launch(sigmoid_gate, args);
}

void snake_entry(nb::handle x_arg, nb::handle scale_arg, nb::handle share_arg, nb::handle y_arg) {
  Op op("snake");
  const Tensor x = op.tensor(x_arg, "x", {"...", "C"}, kFloats);
  const Tensor scale = op.tensor(scale_arg, "scale", {"C"}, one_of({DType::f32}));
  const Tensor share = op.tensor(share_arg, "share", {"C"}, one_of({DType::f32}));
  const Tensor y = op.tensor(y_arg, "out", {"...", "C"}, kFloats);
  op.same_dtype(x, y);
  same_shape(op, x, y);
  SnakeArgs args;
  args.x = op.heads(x);
  args.y = op.heads(y);
  args.scale = scale.as<float>();
  args.share = share.as<float>();
  args.inner = x.rank >= 3 ? x.size(-2) : 1;
  args.outer = args.inner ? op.num_rows(x) / args.inner : 0;
  args.width = op["C"];
  launch(snake, args);
}

}  // namespace

void bind_activation(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "activate",
      [](nb::handle x_arg, nb::handle y_arg, const char* activation) {
        Op op(activation);
        const Tensor x = op.tensor(x_arg, "x", {"..."}, kFloats);
        const Tensor y = op.tensor(y_arg, "out", {"..."}, kFloats);
        op.same_dtype(x, y);
        same_shape(op, x, y);
        ElementwiseArgs args;
        set_rows(op, args, x, {}, y);
        args.activation = activation_named(op, activation);
        launch(activate, args);
      },
      "x"_a, "out"_a, "activation"_a);

  m.def(
      "activate_and_mul",
      [](nb::handle x_arg, nb::handle y_arg, const char* activation) {
        Op op("activate_and_mul");
        const Tensor x = op.tensor(x_arg, "x", {"...", "D"}, kFloats);
        const Tensor y = op.tensor(y_arg, "out", {"...", "I"}, kFloats);
        op.same_dtype(x, y);
        OP_REQUIRE(op, op["D"] == 2 * op["I"] && y.rank == x.rank && op.num_rows(y) == op.num_rows(x),
                   "out is " + to_string(y) + ", expected half of the last axis of x, " + to_string(x));
        ElementwiseArgs args;
        args.x = op.rows(x);
        args.y = op.rows(y);
        args.rows = op.num_rows(x);
        args.width = op["I"];
        args.activation = activation_named(op, activation);
        launch(gate, args);
      },
      "x"_a, "out"_a, "activation"_a);

  m.def(
      "add",
      [](nb::handle x_arg, nb::handle y_arg, nb::handle out_arg) {
        Op op("add");
        const Tensor x = op.tensor(x_arg, "x", {"..."}, kFloats);
        const Tensor y = op.tensor(y_arg, "y", {"..."}, kFloats);
        const Tensor out = op.tensor(out_arg, "out", {"..."}, kFloats);
        for (const Tensor* t : {&y, &out}) {
          op.same_dtype(x, *t);
          same_shape(op, x, *t);
        }
        ElementwiseArgs args;
        set_rows(op, args, x, y, out);
        launch(add, args);
      },
      "x"_a, "y"_a, "out"_a);

  m.def("sigmoid_gate", &sigmoid_gate_entry, "x"_a, "gate"_a, "out"_a);
  m.def("snake", &snake_entry, "x"_a, "scale"_a, "share"_a, "out"_a);
}

}  // namespace tilewright
