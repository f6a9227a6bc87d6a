#include "kernels/moe/moe.h"

#include "bindings/checks.h"
#include "bindings/packed.h"
#include "bindings/tensor.h"

namespace tilewright {
namespace {

constexpr DTypes kFloat32 = one_of({DType::f32});
constexpr DTypes kInt32 = one_of({DType::i32});

Scoring scoring_named(const Op& op, const std::string& name) {
  std::string known;
  for (int i = 0; i < kNumScorings; ++i) {
    const char* candidate = name_of(static_cast<Scoring>(i));
    if (name == candidate) return static_cast<Scoring>(i);
    known += std::string(i ? ", " : "") + candidate;
  }
  op.fail("scoring is '" + name + "', expected one of " + known);
}

// The experts of each token and their weights.
struct Choice {
  Tensor ids, weights;
};

Choice choice_of(Op& op, nb::handle ids_arg, nb::handle weights_arg) {
  const Choice choice = {op.tensor(ids_arg, "ids", {"T", "k"}, kInt32),
                         op.tensor(weights_arg, "weights", {"T", "k"}, kFloat32)};
  op.contiguous(choice.ids);
  op.contiguous(choice.weights);
  return choice;
}

void route_entry(nb::handle logits_arg, nb::handle ids_arg, nb::handle weights_arg, bool renormalize,
                 const std::string& scoring) {
  Op op("route");
  const Tensor logits = op.tensor(logits_arg, "logits", {"T", "E"}, kFloats);
  const auto [ids, weights] = choice_of(op, ids_arg, weights_arg);
  OP_REQUIRE(
      op, op["k"] >= 1 && op["k"] <= op["E"],
      "top_k is " + std::to_string(op["k"]) + ", expected 1 to the number of experts, " + std::to_string(op["E"]));
  RouteArgs args;
  args.logits = op.rows(logits);
  args.num_tokens = op["T"];
  args.num_experts = op["E"];
  args.top_k = op["k"];
  args.scoring = scoring_named(op, scoring);
  args.renormalize = renormalize;
  args.ids = ids.as<int32_t>();
  args.weights = weights.as<float>();
  launch(route, args);
}

void moe_entry(nb::handle x_arg, nb::handle ids_arg, nb::handle weights_arg, const nb::tuple& gate_up_arg,
               const nb::tuple& down_arg, const std::string& activation, nb::handle residual_arg, nb::handle y_arg) {
  Op op("moe");
  const PackedWeight gate_up = packed_of(op, gate_up_arg, "gate_up", {"E", "_"});
  const PackedWeight down = packed_of(op, down_arg, "down", {"E", "_"});
  OP_REQUIRE(
      op, gate_up.gated && !down.gated && gate_up.n == 2 * down.k && gate_up.k == down.n,
      "gate_up is " + to_string(gate_up) + " and down " + to_string(down) + ", expected gated [2I, D] and [D, I]");
  op.bind("D", down.n);
  const Tensor x = op.tensor(x_arg, "x", {"T", "D"}, kFloats);
  const auto [ids, weights] = choice_of(op, ids_arg, weights_arg);
  const Tensor residual = op.optional(residual_arg, "residual", {"T", "D"}, kFloats);
  const Tensor y = op.tensor(y_arg, "out", {"T", "D"}, kFloats);
  OP_REQUIRE(op, op["k"] >= 1, "ids is " + to_string(ids) + ", expected at least one expert per token");
  if (residual) op.same_dtype(y, residual);
  require_of_results(Ids{op.name(), ids.name, ids.data, ids.dtype, ids.numel(), op["E"], op["k"]});
  MoeArgs args;
  args.x = op.rows(x);
  args.ids = ids.as<int32_t>();
  args.weights = weights.as<float>();
  args.gate_up = gate_up;
  args.down = down;
  args.residual = op.rows(residual);
  args.y = op.rows(y);
  args.num_tokens = op["T"];
  args.num_experts = op["E"];
  args.top_k = op["k"];
  args.activation = activation_named(op, activation);
  launch(moe, args);
}

}  // namespace

void bind_moe(nb::module_& m) {
  using namespace nb::literals;
  m.def("route", &route_entry, "logits"_a, "ids"_a, "weights"_a, "renormalize"_a, "scoring"_a);
  m.def("moe", &moe_entry, "x"_a, "ids"_a, "weights"_a, "gate_up"_a, "down"_a, "activation"_a, "residual"_a.none(),
        "out"_a);
}

}  // namespace tilewright
