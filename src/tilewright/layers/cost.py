"""Bytes read and multiply-adds per token in parts of a network, from the sizes of their weights."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.weights.linear import ExpertsWeight, LinearWeight
from tilewright.weights.spec import iter_weights


@dataclass(frozen=True)
class Cost:
    """Cost of one token in some layers. Norms are some KB and are left out."""

    weight_bytes: int = 0  # each packed weight once, of experts only those that the token selects
    multiply_adds: int = 0
    expert_bytes_per_token: int = 0  # the part of weight_bytes that another token, with other experts, reads anew
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
    """Cost of one token in a decoder, and multiply-adds of one query and one key over all layers of a kind."""

    layers: Cost  # those that every token goes through
    cross_layers: Cost  # those that a token which sees encoder states goes through in addition
    head: Cost
    multiply_adds_per_pair: int
    cross_multiply_adds_per_pair: int


@dataclass(frozen=True)
class PredictorCost:
    """Cost of one token in a multi-token predictor; the head of a draft is the model's."""

    keys: Cost  # of computing its key and value
    rest: Cost  # of the part that only drafts go through
    multiply_adds_per_pair: int


def linear_cost(*parts: object) -> Cost:
    """Return the cost of all linears in some parts."""
    linears = [weight for part in parts for weight in iter_weights(part) if isinstance(weight, LinearWeight)]
    return sum((_linear_cost(weight) for weight in linears), Cost())


def expert_cost(experts: ExpertsWeight, num_chosen: int) -> Cost:
    """Return the cost of an experts' weight of which each token uses `num_chosen` experts."""
    weights = experts.value
    chosen_bytes = num_chosen * weights.size_bytes // experts.num_experts
    return Cost(chosen_bytes, num_chosen * weights.n * weights.k, chosen_bytes, weights.size_bytes)


def _linear_cost(linear: LinearWeight) -> Cost:
    weight = linear.value
    bias_bytes = 0 if weight.bias is None else weight.bias.nbytes
    return Cost(weight.size_bytes + bias_bytes, weight.n * weight.k)
