#include "kernels/linear/linear.h"

#include "bindings/packed.h"
#include "bindings/tensor.h"
#include "kernels/linear/round_weight.h"

namespace tilewright {
namespace {

// A weight [N, K] in one of `dtypes`, and its packed form.
PackArgs pack_args(Op& op, nb::handle plain_arg, const char* name, const PackedWeight& packed, DTypes dtypes) {
  op.bind("N", packed.n);
  op.bind("K", packed.k);
  const Tensor plain = op.tensor(plain_arg, name, {"N", "K"}, dtypes);
  return {op.rows(plain), packed};
}

// Reads scales, and mins or steps if the format has them, of args.form or args.packed.
template <class Args>
void take_scales(Op& op, nb::handle scales_arg, nb::handle mins_arg, nb::handle steps_arg, const PackedWeight& weight,
                 Args& args) {
  const bool with_steps = has_steps(weight.format);
  op.bind("scales", with_steps ? 1 : weight.num_groups());
  op.bind("steps", 2 * weight.num_groups());
  const DTypes dtypes = one_of({with_steps ? DType::f32 : weight.scale_dtype()});
  const Tensor scales = op.tensor(scales_arg, "scales", {"N", "scales"}, dtypes);
  const Tensor mins = op.optional(mins_arg, "mins", {"N", "scales"}, dtypes);
  const Tensor steps = op.optional(steps_arg, "steps", {"N", "steps"}, one_of({DType::u8}));
  const auto require = [&](const Tensor& given, bool expected, const char* name) {
    OP_REQUIRE(op, static_cast<bool>(given) == expected,
               std::string(name) + (given ? " are given, " : " are missing, ") + name_of(weight.format) +
                   (given ? " has none" : " has them"));
  };
  require(mins, has_mins(weight.format), "mins");
  require(steps, with_steps, "steps");
  args.scales = op.rows(scales);
  args.mins = op.rows(mins);
  args.steps = op.rows(steps);
}

void pack_quantized(nb::handle values_arg, nb::handle scales_arg, nb::handle mins_arg, nb::handle steps_arg,
                    const nb::tuple& packed_arg) {
  Op op("pack_quantized");
  const PackedWeight packed = packed_of(op, packed_arg, "weight", {"_"});
  OP_REQUIRE(op, is_quantized(packed.format), std::string(name_of(packed.format)) + " is not quantised");
  op.bind("N", packed.n);
  op.bind("quants", packed.num_quants());
  PackArgs args = {op.rows(op.tensor(values_arg, "values", {"N", "quants"}, one_of({DType::u8}))), packed};
  take_scales(op, scales_arg, mins_arg, steps_arg, packed, args);
  launch(pack_weight, args);
}

void quantize(nb::handle weight_arg, nb::handle form_arg, nb::handle values_arg, nb::handle scales_arg,
              nb::handle mins_arg, nb::handle steps_arg) {
  Op op("quantize");
  RoundArgs args;
  args.form = described_by(op, form_arg);
  const WeightFormat format = args.form.format;
  OP_REQUIRE(op, traits_of(format).has_rounding,
             std::string("the format is ") + name_of(format) + ", which is not rounded here");
  op.bind("N", args.form.n);
  op.bind("K", args.form.k);
  args.weight = op.rows(op.tensor(weight_arg, "weight", {"N", "K"}, kFloats));
  op.bind("quants", args.form.num_quants());
  args.values = op.rows(op.tensor(values_arg, "values", {"N", "quants"}, one_of({DType::u8})));
  take_scales(op, scales_arg, mins_arg, steps_arg, args.form, args);
  launch(round_weight, args);
}

}  // namespace

void bind_linear(nb::module_& m) {
  using namespace nb::literals;
  m.def("packed_elements", [](nb::handle form) { return described_by(Op("packed_elements"), form).elements(); });
  m.def("packed_layout",
        [](const std::string& format) { return name_of(layout_of(format_named(Op("packed_layout"), format))); });
  m.def("packed_scales", [](nb::handle form) { return described_by(Op("packed_scales"), form).num_scales(); });
  m.def("pack_weight", [](nb::handle source, const nb::tuple& packed_arg) {
    Op op("pack_weight");
    const PackedWeight packed = packed_of(op, packed_arg, "weight", {"_"});
    OP_REQUIRE(op, !is_quantized(packed.format), std::string(name_of(packed.format)) + " takes quantised values");
    launch(pack_weight, pack_args(op, source, "source", packed, kFloats));
  });
  m.def("pack_quantized", &pack_quantized, "values"_a, "scales"_a, "mins"_a.none(), "steps"_a.none(), "packed"_a);
  m.def("quantize", &quantize, "weight"_a, "form"_a, "values"_a, "scales"_a, "mins"_a.none(), "steps"_a.none());
  m.def("unpack_weight", [](const nb::tuple& packed, nb::handle out) {
    Op op("unpack_weight");
    launch(unpack_weight, pack_args(op, out, "out", packed_of(op, packed, "weight", {"_"}), kFloats));
  });

  m.def(
      "linear",
      [](nb::handle x_arg, const nb::tuple& packed, nb::handle bias_arg, nb::handle residual_arg, nb::handle y_arg,
         const std::string& activation, nb::handle columns_arg) {
        Op op("linear");
        const PackedWeight weight = packed_of(op, packed, "weight", {"_"});
        op.bind("K", weight.k);
        op.bind("N", weight.out_features());
        op.bind("padded", weight.num_strips() * kStripColumns);
        const Tensor x = op.tensor(x_arg, "x", {"...", "K"}, kFloats);
        const Tensor bias = op.optional(bias_arg, "bias", {"padded"}, one_of({DType::f32}));
        const Tensor residual = op.optional(residual_arg, "residual", {"...", "N"}, kFloats);
        const Tensor y = op.tensor(y_arg, "out", {"...", "N"}, kFloats);
        const Tensor columns = op.optional(columns_arg, "columns", {"K"}, one_of({DType::i32}));
        OP_REQUIRE(op, !columns || rounds_x(weight.format),
                   std::string("columns are in another order, which ") + name_of(weight.format) + " does not take");
        const int64_t rows = op.num_rows(x);
        OP_REQUIRE(op, op.num_rows(y) == rows, "out is " + to_string(y) + ", expected the rows of x, " + to_string(x));
        if (residual) {
          op.same_dtype(y, residual);
          OP_REQUIRE(op, op.num_rows(residual) == rows,
                     "residual is " + to_string(residual) + ", expected the shape of out");
        }
        LinearArgs args;
        args.x = op.rows(x);
        args.weight = weight;
        args.bias = bias.as<float>();
        args.residual = op.rows(residual);
        args.y = op.rows(y);
        args.m = rows;
        args.activation = activation_named(op, activation);
        args.x_columns = columns.as<int32_t>();
        launch(linear, args);
      },
      "x"_a, "packed"_a, "bias"_a.none(), "residual"_a.none(), "out"_a, "activation"_a, "columns"_a.none());
}

}  // namespace tilewright
