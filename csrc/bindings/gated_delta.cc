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
  args.qkvz = qkvz.data;
  args.ba = ba.data;
  args.qkvz_stride = qkvz.stride(0);
  args.ba_stride = ba.stride(0);
  args.qkv = qkv.data;
  args.z = z.data;
  args.b = b.data;
  args.a = a.data;
  args.qkv_stride = qkv.stride(0);
  args.z_stride = z.stride(0);
  args.b_stride = b.stride(0);
  args.a_stride = a.stride(0);
  args.num_tokens = op["T"];
  args.key_heads = key_heads;
  args.value_heads = value_heads;
  args.key_width = key_width;
  args.value_width = value_width;
  args.interleaved = interleaved;
  args.dtype = qkvz.dtype;
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
  args.a = a.data;
  args.b = b.data;
  args.a_stride = a.stride(0);
  args.b_stride = b.stride(0);
  args.dtype = a.dtype;
  args.a_log = a_log.data;
  args.dt_bias = dt_bias.data;
  args.a_log_dtype = a_log.dtype;
  args.dt_bias_dtype = dt_bias.dtype;
  args.g = static_cast<float*>(g.data);
  args.beta = static_cast<float*>(beta.data);
  args.g_stride = g.stride(0);
  args.beta_stride = beta.stride(0);
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
  const Sequences sequences = sequences_of(op, starts_arg, read_arg, write_arg, op["T"], states.size(0));
  GatedDeltaArgs args = {};
  args.q = q.data;
  args.k = k.data;
  args.v = v.data;
  args.out = out.data;
  args.q_token_stride = q.stride(0);
  args.q_head_stride = q.stride(1);
  args.k_token_stride = k.stride(0);
  args.k_head_stride = k.stride(1);
  args.v_token_stride = v.stride(0);
  args.v_head_stride = v.stride(1);
  args.out_token_stride = out.stride(0);
  args.out_head_stride = out.stride(1);
  args.dtype = q.dtype;
  args.g = static_cast<const float*>(g.data);
  args.beta = static_cast<const float*>(beta.data);
  args.g_stride = g.stride(0);
  args.beta_stride = beta.stride(0);
  args.states = static_cast<float*>(states.data);
  args.slot_stride = states.stride(0);
  args.starts = sequences.starts;
  args.read_slots = sequences.read_slots;
  args.write_slots = sequences.write_slots;
  args.num_sequences = sequences.count;
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
