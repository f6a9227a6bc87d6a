"""What a model must read and compute at least, by its sizes: the limit its speed is held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.layers.cross_attention import CrossLayer
from tilewright.layers.decoder import Decoder
from tilewright.layers.moe import SparseMlp
from tilewright.models.protocol import KvSpec, StateSpec
from tilewright.ops.linear import PackedWeight
from tilewright.weights.spec import Linear, walk


@dataclass(frozen=True)
class Costs:
    """Of the text side of a model; a vision tower is no part of it, nor are layers that text alone leaves out."""

    weight_bytes_per_step: int  # of one token: each packed weight once, of experts only those a token is sent to
    expert_bytes_per_token: int  # the part of these that another token, sent elsewhere, reads anew
    expert_bytes: int  # of all experts of all layers
    kv_bytes_per_token: int
    linear_flops_per_token: int  # without the head, which only the tokens that are sampled from need
    head_flops: int
    attention_flops_per_pair: int  # of one query and one key, over all layers
    state_bytes_per_sequence: int = 0  # in recurrent layers
    cross_bytes_per_step: int = 0  # of the layers that a token which looks at a picture goes through besides

    def decode_bytes(self, context: int) -> int:
        """What a step of one sequence reads that has `context` tokens."""
        return self.weight_bytes_per_step + context * self.kv_bytes_per_token + self.state_bytes_per_sequence

    def step_bytes(self, num_tokens: int, num_keys: int, num_sequences: int) -> int:
        """What a step of many tokens reads at least, with `num_keys` tokens in the pages of its sequences."""
        experts = min(self.expert_bytes, num_tokens * self.expert_bytes_per_token)
        dense = self.weight_bytes_per_step - self.expert_bytes_per_token
        states = num_sequences * self.state_bytes_per_sequence
        return dense + experts + num_keys * self.kv_bytes_per_token + states

    def step_flops(self, num_tokens: int, num_logits: int, num_pairs: int) -> int:
        """What a step multiplies and adds, with `num_pairs` of a query and a key."""
        linears = num_tokens * self.linear_flops_per_token + num_logits * self.head_flops
        return linears + num_pairs * self.attention_flops_per_pair

    def prefill_flops(self, num_tokens: int) -> int:
        """Of all linears over a prompt, and the head once. Attention comes on top: see `attention_flops`."""
        return num_tokens * self.linear_flops_per_token + self.head_flops

    def attention_flops(self, num_tokens: int) -> int:
        """Of a prompt's causal attention."""
        return self.attention_flops_per_pair * num_tokens * (num_tokens + 1) // 2


def costs_of(decoder: Decoder, kv_spec: KvSpec, kv_itemsize: int, state_spec: StateSpec | None = None) -> Costs:
    """The costs of a loaded decoder."""
    config = decoder.config
    head = decoder.head.value
    weights = list(_weights_of_a_token(decoder))
    experts = list(_expert_sizes(decoder))
    return Costs(
        weight_bytes_per_step=_size_bytes(head) + sum(size_bytes for size_bytes, _ in weights),
        expert_bytes_per_token=sum(size_bytes * chosen for size_bytes, chosen, _ in experts),
        expert_bytes=sum(size_bytes * count for size_bytes, _, count in experts),
        kv_bytes_per_token=kv_spec.bytes_per_token(kv_itemsize),
        linear_flops_per_token=2 * sum(multiplies for _, multiplies in weights),
        head_flops=2 * head.n * head.k,
        attention_flops_per_pair=4 * config.num_kv_layers * config.attention.num_heads * config.attention.head_width,
        state_bytes_per_sequence=0 if state_spec is None else state_spec.bytes_per_slot(kv_itemsize),
        cross_bytes_per_step=sum(_cross_sizes(decoder)),
    )


def _weights_of_a_token(decoder: Decoder) -> Iterator[tuple[int, int]]:
    """(bytes, multiply-adds) of everything in the layers that one token goes through. Norms are some KB: left out."""
    for layer in decoder.layers:
        if isinstance(layer, CrossLayer):
            continue
        for weight in walk(layer):
            if isinstance(weight, Linear):
                yield _size_bytes(weight.value), weight.value.n * weight.value.k
        if isinstance(layer.mlp, SparseMlp):
            for experts in (layer.mlp.gate_up.value, layer.mlp.down.value):
                chosen = layer.mlp.config.experts_per_token
                yield chosen * experts.data[0].nbytes, chosen * experts.n * experts.k


def _cross_sizes(decoder: Decoder) -> Iterator[int]:
    """Bytes of each linear of cross-attention layers but those that make keys and values, once for a picture."""
    for layer in decoder.layers:
        if isinstance(layer, CrossLayer):
            for weight in walk(layer):
                if isinstance(weight, Linear) and weight is not layer.attention.key_value:
                    yield _size_bytes(weight.value)


def _expert_sizes(decoder: Decoder) -> Iterator[tuple[int, int, int]]:
    """(bytes of one, how many a token is sent to, how many there are) of the experts' weights, layer by layer."""
    for layer in decoder.layers:
        if isinstance(layer.mlp, SparseMlp):
            for experts in (layer.mlp.gate_up.value, layer.mlp.down.value):
                yield experts.data[0].nbytes, layer.mlp.config.experts_per_token, len(experts.data)


def _size_bytes(weight: PackedWeight) -> int:
    return weight.data.nbytes + (0 if weight.bias is None else weight.bias.nbytes)
