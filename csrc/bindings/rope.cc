#include "kernels/rope/rope.h"

#include "base/bf16.h"
#include "bindings/checks.h"
#include "bindings/tensor.h"

namespace tilewright {
namespace {

struct Table {
  Tensor cos, sin;
};

Table table_of(Op& op, nb::handle cos_arg, nb::handle sin_arg) {
  const Table table = {op.tensor(cos_arg, "cos", {"T", "R/2"}, one_of({DType::f32})),
                       op.tensor(sin_arg, "sin", {"T", "R/2"}, one_of({DType::f32}))};
  OP_REQUIRE(op, op["T"] <= 1 || table.cos.stride(0) == table.sin.stride(0), "cos and sin have different row strides");
  return table;
}

RopeHeads heads_of(const Op& op, const Tensor& x, const Tensor& y) { return {op.heads(x), op.heads(y), x.size(1)}; }

// The weight as the kernel's factors, widened once per call rather than once per head.
std::vector<float> factors_of(const Tensor& weight, bool plus_one) {
  std::vector<float> factors(static_cast<size_t>(weight.numel()));
  for (size_t i = 0; i < factors.size(); ++i) {
    const float value = weight.dtype == DType::f32 ? weight.as<float>()[i] : to_float(weight.as<bf16>()[i]);
    factors[i] = value + (plus_one ? 1.0f : 0.0f);
  }
  return factors;
}

RopeArgs args_of(const Op& op, const Table& table, bool interleaved) {
  OP_REQUIRE(
      op, 2 * op["R/2"] <= op["K"],
      "cos has " + std::to_string(op["R/2"]) + " frequencies, too many for heads of width " + std::to_string(op["K"]));
  RopeArgs args;
  args.cos = table.cos.as<float>();
  args.sin = table.sin.as<float>();
  args.table_stride = table.cos.stride(0);
  args.num_tokens = op["T"];
  args.head_width = op["K"];
  args.num_frequencies = op["R/2"];
  args.interleaved = interleaved;
  return args;
}

void rope_table_entry(nb::handle positions_arg, nb::handle inv_freq_arg, nb::handle axes_arg, nb::handle cos_arg,
                      nb::handle sin_arg, float attention_scaling) {
  Op op("rope_table");
  const Tensor positions = op.tensor(positions_arg, "positions", {"A", "T"}, one_of({DType::i64, DType::f32}));
  const Tensor inv_freq = op.tensor(inv_freq_arg, "inv_freq", {"R/2"}, one_of({DType::f32}));
  const Tensor axes = op.tensor(axes_arg, "axis_of_frequency", {"R/2"}, one_of({DType::i32}));
  const Table table = table_of(op, cos_arg, sin_arg);
  op.contiguous(table.cos);
  op.contiguous(table.sin);
  RopeTableArgs args;
  args.positions = positions.data;
  args.axis_stride = positions.stride(0);
  args.position_dtype = positions.dtype;
  args.inv_freq = inv_freq.as<float>();
  args.axis_of_frequency = axes.as<int32_t>();
  args.attention_scaling = attention_scaling;
  args.cos = table.cos.as<float>();
  args.sin = table.sin.as<float>();
  args.num_tokens = op["T"];
  args.num_frequencies = op["R/2"];
  require_of_inputs(Ids{op.name(), axes.name, axes.data, axes.dtype, axes.numel(), op["A"]});
  launch(rope_table, args);
}

void rope_entry(nb::handle x_arg, nb::handle cos_arg, nb::handle sin_arg, nb::handle out_arg, bool interleaved) {
  Op op("rope");
  const Tensor x = op.tensor(x_arg, "x", {"T", "H", "K"}, kFloats);
  const Tensor out = op.tensor(out_arg, "out", {"T", "H", "K"}, kFloats);
  op.same_dtype(x, out);
  RopeArgs args = args_of(op, table_of(op, cos_arg, sin_arg), interleaved);
  args.parts[0] = heads_of(op, x, out);
  launch(rope, args);
}

void qk_norm_rope_entry(nb::handle q_arg, nb::handle k_arg, nb::handle q_weight_arg, nb::handle k_weight_arg,
                        nb::handle cos_arg, nb::handle sin_arg, float eps, bool weight_plus_one, bool interleaved) {
  Op op(q_weight_arg.is_none() ? "rope_qk" : "qk_norm_rope");
  const Tensor q = op.tensor(q_arg, "q", {"T", "H", "K"}, kFloats);
  const Tensor k = op.tensor(k_arg, "k", {"T", "G", "K"}, kFloats);
  const Tensor q_weight = op.optional(q_weight_arg, "q_weight", {"K"}, kFloats);
  const Tensor k_weight = op.optional(k_weight_arg, "k_weight", {"K"}, kFloats);
  op.same_dtype(q, k);
  OP_REQUIRE(op, bool(q_weight) == bool(k_weight), "q_weight and k_weight are given together or not at all");
  RopeArgs args = args_of(op, table_of(op, cos_arg, sin_arg), interleaved);
  args.parts[0] = heads_of(op, q, q);
  args.parts[1] = heads_of(op, k, k);
  args.num_parts = 2;
  args.eps = eps;
  std::vector<float> q_factors, k_factors;
  if (q_weight) {
    q_factors = factors_of(q_weight, weight_plus_one);
    k_factors = factors_of(k_weight, weight_plus_one);
    args.parts[0].norm_weight = q_factors.data();
    args.parts[1].norm_weight = k_factors.data();
  }
  if (Plan* plan = Plan::recording()) {  // moved, not copied: what `args` points to stays where it is
    plan->keep(std::move(q_factors));
    plan->keep(std::move(k_factors));
  }
  launch(rope, args);
}

}  // namespace

void bind_rope(nb::module_& m) {
  using namespace nb::literals;
  m.def("rope_table", &rope_table_entry, "positions"_a, "inv_freq"_a, "axis_of_frequency"_a, "cos"_a, "sin"_a,
        "attention_scaling"_a);
  m.def("rope", &rope_entry, "x"_a, "cos"_a, "sin"_a, "out"_a, "interleaved"_a);
  m.def("qk_norm_rope", &qk_norm_rope_entry, "q"_a, "k"_a, "q_weight"_a.none(), "k_weight"_a.none(), "cos"_a, "sin"_a,
        "eps"_a, "weight_plus_one"_a, "interleaved"_a);
}

}  // namespace tilewright
