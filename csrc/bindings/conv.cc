#include "kernels/conv/conv.h"

#include "bindings/sequences.h"
#include "bindings/tensor.h"

namespace tilewright {

void bind_conv(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "causal_conv",
      [](nb::handle x_arg, nb::handle weight_arg, nb::handle bias_arg, nb::handle states_arg, nb::handle starts_arg,
         nb::handle read_arg, nb::handle write_arg, nb::handle y_arg) {
        Op op("causal_conv");
        const Tensor x = op.tensor(x_arg, "x", {"T", "C"}, kFloats);
        const Tensor weight = op.tensor(weight_arg, "weight", {"W", "C"}, kFloats);
        const Tensor bias = op.optional(bias_arg, "bias", {"C"}, kFloats);
        OP_REQUIRE(op, op["W"] >= 1, "weight has 0 taps, expected 1 or more");
        op.bind("W-1", op["W"] - 1);
        const Tensor states = op.tensor(states_arg, "states", {"_", "W-1", "C"}, kFloats);
        const Tensor y = op.tensor(y_arg, "out", {"T", "C"}, kFloats);
        op.same_dtype(x, y);
        if (bias) op.same_dtype(weight, bias);
        op.contiguous(weight);
        OP_REQUIRE(op, states.numel() == 0 || states.stride(1) == op["C"],
                   "states is " + to_string(states) + " with rows " + std::to_string(states.stride(1)) +
                       " apart, the states of a slot must be contiguous");
        OP_REQUIRE(op, x.data != y.data || x.numel() == 0, "out is x, expected other memory");
        ConvArgs args = {};
        args.x = op.rows(x);
        args.y = op.rows(y);
        args.weight = weight.data;
        args.bias = bias.data;
        args.weight_dtype = weight.dtype;
        args.states = {states.data, states.stride(0), states.dtype};
        args.sequences = sequences_of(op, starts_arg, read_arg, write_arg, op["T"], states.size(0));
        args.channels = op["C"];
        args.width = static_cast<int>(op["W"]);
        launch(causal_conv, args);
      },
      "x"_a, "weight"_a, "bias"_a.none(), "states"_a, "starts"_a, "read_slots"_a, "write_slots"_a.none(), "out"_a);
}

}  // namespace tilewright
