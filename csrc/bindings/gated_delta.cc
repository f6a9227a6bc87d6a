#include "kernels/gated_delta/gated_delta.h"

#include "bindings/sequences.h"
#include "bindings/tensor.h"
#include "kernels/delta_inputs/delta_inputs.h"

namespace tilewright {
namespace {

constexpr DTypes kFloat32 = one_of({DType::f32});

void check_heads(const Op& op, int64_t key_heads, int64_t value_heads) {
  OP_REQUIRE(op, key_heads > 0 && value_heads % key_heads == 0,
             "there are " + std::to_string(value_heads) + " value heads, expected a multiple of the " +
                 std::to_string(key_heads) + " key heads");
}

void split_entry(nb::handle qkvz_arg, nb::handle ba_arg, nb::handle qkv_arg, nb::handle z_arg, nb::handle b_arg,
                 nb::handle a_arg, int64_t key_heads, int64_t value_heads, int64_t key_width, int64_t value_width,
                 bool interleaved) {
  Op op("split_projections");
  check_heads(op, key_heads, value_heads);
  const int64_t keys = key_heads * key_width, values = value_heads * value_width;
  op.bind("GK+GK+HV+HV", 2 * keys + 2 * values);
  op.bind("GK+GK+HV", 2 * keys + values);
  op.bind("H", value_heads);
  op.bind("H+H", 2 * value_heads);
  op.bind("V", value_width);
  const Tensor qkvz = op.tensor(qkvz_arg, "qkvz", {"T", "GK+GK+HV+HV"}, kFloats);
  const Tensor ba = op.tensor(ba_arg, "ba", {"T", "H+H"}, kFloats);
  const Tensor qkv = op.tensor(qkv_arg, "qkv", {"T", "GK+GK+HV"}, kFloats);
  const Tensor z = op.tensor(z_arg, "z", {"T", "H", "V"}, kFloats);
  const Tensor b = op.tensor(b_arg, "b", {"T", "H"}, kFloats);
  const Tensor a = op.tensor(a_arg, "a", {"T", "H"}, kFloats);
  for (const Tensor* t : {&ba, &qkv, &z, &b, &a}) op.same_dtype(qkvz, *t);
  OP_REQUIRE(op, z.numel() == 0 || value_heads == 1 || z.stride(1) == value_width, "the heads of z must be contiguous");
  SplitArgs args = {};
  args.qkvz = op.rows(qkvz);
  args.ba = op.rows(ba);
  args.qkv = op.rows(qkv);
  args.z = {z.data, z.stride(0), z.dtype};
  args.b = op.rows(b);
  args.a = op.rows(a);
  args.num_tokens = op["T"];
  args.key_heads = key_heads;
  args.value_heads = value_heads;
  args.key_width = key_width;
  args.value_width = value_width;
  args.interleaved = interleaved;
  launch(split_projections, args);
}

void gates_entry(nb::handle a_arg, nb::handle b_arg, nb::handle a_log_arg, nb::handle dt_bias_arg, nb::handle g_arg,
                 nb::handle beta_arg) {
  Op op("delta_gates");
  const Tensor a = op.tensor(a_arg, "a", {"T", "H"}, kFloats);
  const Tensor b = op.tensor(b_arg, "b", {"T", "H"}, kFloats);
  const Tensor a_log = op.tensor(a_log_arg, "a_log", {"H"}, kFloats);
  const Tensor dt_bias = op.tensor(dt_bias_arg, "dt_bias", {"H"}, kFloats);
  const Tensor g = op.tensor(g_arg, "g", {"T", "H"}, kFloat32);
  const Tensor beta = op.tensor(beta_arg, "beta", {"T", "H"}, kFloat32);
  op.same_dtype(a, b);
  GatesArgs args = {};
  args.a = op.rows(a);
  args.b = op.rows(b);
  args.a_log = a_log.data;
  args.dt_bias = dt_bias.data;
  args.a_log_dtype = a_log.dtype;
  args.dt_bias_dtype = dt_bias.dtype;
  args.g = op.rows(g);
  args.beta = op.rows(beta);
  args.num_tokens = op["T"];
  args.num_heads = op["H"];
  launch(delta_gates, args);
}

void rule_entry(nb::handle q_arg, nb::handle k_arg, nb::handle v_arg, nb::handle g_arg, nb::handle beta_arg,
                nb::handle states_arg, nb::handle starts_arg, nb::handle read_arg, nb::handle write_arg,
                nb::handle out_arg, float scale, bool normalize, float eps) {
  Op op("gated_delta_rule");
  const Tensor q = op.tensor(q_arg, "q", {"T", "G", "K"}, kFloats);
  const Tensor k = op.tensor(k_arg, "k", {"T", "G", "K"}, kFloats);
  const Tensor v = op.tensor(v_arg, "v", {"T", "H", "V"}, kFloats);
  const Tensor g = op.tensor(g_arg, "g", {"T", "H"}, kFloat32);
  const Tensor beta = op.tensor(beta_arg, "beta", {"T", "H"}, kFloat32);
  const Tensor states = op.tensor(states_arg, "states", {"_", "H", "K", "V"}, kFloat32);
  const Tensor out = op.tensor(out_arg, "out", {"T", "H", "V"}, kFloats);
  for (const Tensor* t : {&k, &v, &out}) op.same_dtype(q, *t);
  check_heads(op, op["G"], op["H"]);
  OP_REQUIRE(op, op["K"] >= 1, "q has heads of width 0, expected 1 or more");
  OP_REQUIRE(op, states.numel() == 0 || (states.stride(2) == op["V"] && states.stride(1) == op["K"] * op["V"]),
             "states is " + to_string(states) + " with strided heads, the state of a slot must be contiguous");
  GatedDeltaArgs args = {};
  args.q = op.heads(q);
  args.k = op.heads(k);
  args.v = op.heads(v);
  args.out = op.heads(out);
  args.g = op.rows(g);
  args.beta = op.rows(beta);
  args.states = states.as<float>();
  args.slot_stride = states.stride(0);
  args.sequences = sequences_of(op, starts_arg, read_arg, write_arg, op["T"], states.size(0));
  args.key_heads = op["G"];
  args.value_heads = op["H"];
  args.key_width = op["K"];
  args.value_width = op["V"];
  args.scale = scale;
  args.eps = eps;
  args.normalize = normalize;
  launch(gated_delta_rule, args);
}

}  // namespace

void bind_gated_delta(nb::module_& m) {
  using namespace nb::literals;
  m.def("split_projections", &split_entry, "qkvz"_a, "ba"_a, "qkv"_a, "z"_a, "b"_a, "a"_a, "key_heads"_a,
        "value_heads"_a, "key_width"_a, "value_width"_a, "interleaved"_a);
  m.def("delta_gates", &gates_entry, "a"_a, "b"_a, "a_log"_a, "dt_bias"_a, "g"_a, "beta"_a);
  m.def("gated_delta_rule", &rule_entry, "q"_a, "k"_a, "v"_a, "g"_a, "beta"_a, "states"_a, "starts"_a, "read_slots"_a,
        "write_slots"_a.none(), "out"_a, "scale"_a, "normalize"_a, "eps"_a);
}

}  // namespace tilewright
