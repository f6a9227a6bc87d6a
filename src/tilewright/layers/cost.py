"""What a token reads and multiplies in parts of a network, by the sizes of their weights."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.weights.linear import ExpertsWeight, LinearWeight
from tilewright.weights.spec import iter_weights


@dataclass(frozen=True)
class Cost:
    """Of one token in some layers. Norms are some KB and are left out."""

    weight_bytes: int = 0  # each packed weight once, of experts only those the token is sent to
    multiply_adds: int = 0
    expert_bytes_per_token: int = 0  # the part of weight_bytes that another token, sent elsewhere, reads anew
    expert_bytes: int = 0  # of all experts

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.weight_bytes + other.weight_bytes,
            self.multiply_adds + other.multiply_adds,
            self.expert_bytes_per_token + other.expert_bytes_per_token,
            self.expert_bytes + other.expert_bytes,
        )


@dataclass(frozen=True)
class DecoderCost:
    """Of one token in a decoder, with the multiply-adds of one query and one key over all layers of a kind."""

    layers: Cost  # that every token goes through
    cross_layers: Cost  # that a token which sees encoder states goes through besides
    head: Cost
    multiply_adds_per_pair: int
    cross_multiply_adds_per_pair: int


@dataclass(frozen=True)
class PredictorCost:
    """Of one token in a multi-token predictor; the head of a draft is the model's."""

    keys: Cost  # what computes its key and value
    rest: Cost  # what only a draft goes through
    multiply_adds_per_pair: int


def linear_cost(*parts: object) -> Cost:
    """Of all linears in some parts."""
    linears = [weight for part in parts for weight in iter_weights(part) if isinstance(weight, LinearWeight)]
    return sum((_linear_cost(weight) for weight in linears), Cost())


def expert_cost(experts: ExpertsWeight, num_chosen: int) -> Cost:
    """Of a weight of experts, of which each token is sent to `num_chosen`."""
    weights = experts.value
    chosen_bytes = num_chosen * weights.size_bytes // experts.num_experts
    return Cost(chosen_bytes, num_chosen * weights.n * weights.k, chosen_bytes, weights.size_bytes)


def _linear_cost(linear: LinearWeight) -> Cost:
    weight = linear.value
    bias_bytes = 0 if weight.bias is None else weight.bias.nbytes
    return Cost(weight.size_bytes + bias_bytes, weight.n * weight.k)
