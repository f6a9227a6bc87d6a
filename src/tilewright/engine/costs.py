"""What a model must read and compute at least, by its sizes: the limit its speed is held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilewright.layers.cross_attention import CrossLayer
from tilewright.layers.decoder import Decoder, DecoderLayer
from tilewright.layers.moe import SparseMlp
from tilewright.models.protocol import Model
from tilewright.ops.linear import PackedWeight
from tilewright.weights.linear import LinearWeight
from tilewright.weights.spec import Weight, iter_weights


@dataclass(frozen=True)
class DraftCosts:
    """Of a multi-token predictor. The head is the model's: it counts in a pass that drafts, once for each draft."""

    weight_bytes: int  # in a pass, experts apart
    head_bytes: int
    expert_bytes_per_draft: int
    kv_bytes_per_token: int
    flops_per_token: int  # that is read: its key and value, and what is computed on the way to them
    flops_per_draft: int
    flops_per_pair: int  # of one query and one key

    def read(self, num_passes: int, num_drafting_passes: int, num_drafts: int, num_keys: int) -> int:
        """Bytes that passes read at least, with `num_keys` keys in them all."""
        weights = num_passes * self.weight_bytes + num_drafting_passes * self.head_bytes
        return weights + num_drafts * self.expert_bytes_per_draft + num_keys * self.kv_bytes_per_token

    def computed(self, num_tokens: int, num_drafts: int, num_pairs: int) -> int:
        """What they multiply and add."""
        return num_tokens * self.flops_per_token + num_drafts * self.flops_per_draft + num_pairs * self.flops_per_pair


@dataclass(frozen=True)
class Costs:
    """Of the text side of a model: a vision tower is no part of it.

    Layers that tokens go through only if they look at a picture count apart (`cross_...`). What is made of a picture
    once, by the tower and for their keys and values, counts nowhere.
    """

    weight_bytes_per_step: int  # of one token: each packed weight once, of experts only those a token is sent to
    expert_bytes_per_token: int  # the part of these that another token, sent elsewhere, reads anew
    expert_bytes: int  # of all experts of all layers
    kv_bytes_per_token: int
    linear_flops_per_token: int  # without the head, which only the tokens that are sampled from need
    head_flops: int
    attention_flops_per_pair: int  # of one query and one key, over all layers
    state_bytes_per_sequence: int = 0  # in recurrent layers
    cross_bytes_per_step: int = 0  # of the layers that a token which looks at a picture goes through besides
    cross_bytes_per_state: int = 0  # keys and values there of one encoder state
    cross_linear_flops_per_token: int = 0
    cross_flops_per_pair: int = 0  # of one query and one encoder state
    draft: DraftCosts | None = None  # of a predictor, which is no part of the rest

    def decode_bytes(self, context: int, num_states: int = 0) -> int:
        """What a step of one sequence reads that has `context` tokens and looks at `num_states` encoder states."""
        own = context * self.kv_bytes_per_token + self.state_bytes_per_sequence
        return self.weight_bytes_per_step + own + self.cross_attention_bytes(num_states)

    def cross_attention_bytes(self, num_states: int) -> int:
        """What a step reads besides whose sequences look at `num_states` encoder states in all."""
        return self.cross_bytes_per_step + num_states * self.cross_bytes_per_state if num_states else 0

    def step_bytes(self, num_tokens: int, num_keys: int, num_sequences: int, num_states: int = 0) -> int:
        """What a step of many tokens reads at least, with `num_keys` tokens in the pages of its sequences."""
        experts = min(self.expert_bytes, num_tokens * self.expert_bytes_per_token)
        dense = self.weight_bytes_per_step - self.expert_bytes_per_token
        own = num_keys * self.kv_bytes_per_token + num_sequences * self.state_bytes_per_sequence
        return dense + experts + own + self.cross_attention_bytes(num_states)

    def step_flops(self, num_tokens: int, num_logits: int, num_pairs: int) -> int:
        """What a step multiplies and adds, with `num_pairs` of a query and a key; looking comes on top."""
        linears = num_tokens * self.linear_flops_per_token + num_logits * self.head_flops
        return linears + num_pairs * self.attention_flops_per_pair

    def cross_attention_flops(self, num_tokens: int, num_pairs: int) -> int:
        """What tokens that look at pictures multiply and add besides, with `num_pairs` of a query and a state."""
        return num_tokens * self.cross_linear_flops_per_token + num_pairs * self.cross_flops_per_pair

    def prefill_flops(self, num_tokens: int) -> int:
        """Of all linears over a prompt, and the head once. Attention comes on top: see `attention_flops`."""
        return num_tokens * self.linear_flops_per_token + self.head_flops

    def attention_flops(self, num_tokens: int) -> int:
        """Of a prompt's causal attention."""
        return self.attention_flops_per_pair * num_tokens * (num_tokens + 1) // 2


def costs_of(model: Model, kv_itemsize: int) -> Costs:
    """The costs of a model that is loaded."""
    decoder, cross_spec, state_spec = model.decoder, model.cross_spec, model.state_spec
    config = decoder.config
    head = decoder.head.packed
    weights = [weight for layer in _own_layers(decoder) for weight in _weights_of_a_token(layer)]
    experts = [sizes for layer in decoder.layers for sizes in _expert_sizes(layer)]
    cross = list(_weights_of_a_look(decoder))
    flops_per_layer_pair = 4 * config.attention.num_heads * config.attention.head_width
    return Costs(
        weight_bytes_per_step=_size_bytes(head) + sum(size_bytes for size_bytes, _ in weights),
        expert_bytes_per_token=sum(size_bytes * chosen for size_bytes, chosen, _ in experts),
        expert_bytes=sum(size_bytes * count for size_bytes, _, count in experts),
        kv_bytes_per_token=_kv_bytes(model, config.num_kv_layers, kv_itemsize),
        linear_flops_per_token=2 * sum(multiplies for _, multiplies in weights),
        head_flops=2 * head.n * head.k,
        attention_flops_per_pair=config.num_kv_layers * flops_per_layer_pair,
        state_bytes_per_sequence=state_spec.bytes_per_slot(kv_itemsize) if state_spec else 0,
        cross_bytes_per_step=sum(size_bytes for size_bytes, _ in cross),
        cross_bytes_per_state=cross_spec.bytes_per_token(kv_itemsize) if cross_spec else 0,
        cross_linear_flops_per_token=2 * sum(multiplies for _, multiplies in cross),
        cross_flops_per_pair=len(config.cross_layers) * flops_per_layer_pair,
        draft=_draft_costs(model, kv_itemsize),
    )


def _draft_costs(model: Model, kv_itemsize: int) -> DraftCosts | None:
    predictor, config, head = model.predictor, model.decoder.config, model.decoder.head.packed
    if predictor is None:
        return None
    layer, projection = predictor.draft_layer, predictor.draft_projection.packed
    every, attention = list(_weights_of_a_token(layer)), list(_linears(layer.attention))
    experts = sum(size_bytes * chosen for size_bytes, chosen, _ in _expert_sizes(layer))
    multiplies, for_keys = (sum(item for _, item in weights) for weights in (every, attention))
    return DraftCosts(
        weight_bytes=_size_bytes(projection) + sum(size_bytes for size_bytes, _ in every) - experts,
        head_bytes=_size_bytes(head),
        expert_bytes_per_draft=experts,
        kv_bytes_per_token=_kv_bytes(model, 1, kv_itemsize),
        flops_per_token=2 * (projection.n * projection.k + for_keys),
        flops_per_draft=2 * (multiplies - for_keys + head.n * head.k),
        flops_per_pair=4 * config.attention.num_heads * config.attention.head_width,
    )


def _kv_bytes(model: Model, num_layers: int, itemsize: int) -> int:
    return replace(model.kv_spec, num_layers=num_layers).bytes_per_token(itemsize)


def _own_layers(decoder: Decoder) -> Iterator[DecoderLayer]:
    """Those that every token goes through."""
    return (layer for layer in decoder.layers if not isinstance(layer, CrossLayer))


def _weights_of_a_token(layer: DecoderLayer) -> Iterator[tuple[int, int]]:
    """(bytes, multiply-adds) of everything in a layer that one token goes through. Norms are some KB: left out."""
    yield from _linears(layer)
    if isinstance(layer.mlp, SparseMlp):
        for experts in (layer.mlp.experts.gate_up.value, layer.mlp.experts.down.value):
            chosen = layer.mlp.config.experts_per_token
            yield chosen * experts.data[0].nbytes, chosen * experts.n * experts.k


def _linears(part: object, *, but: Weight | None = None) -> Iterator[tuple[int, int]]:
    for weight in iter_weights(part):
        if isinstance(weight, LinearWeight) and weight is not but:
            yield _size_bytes(weight.value), weight.value.n * weight.value.k


def _weights_of_a_look(decoder: Decoder) -> Iterator[tuple[int, int]]:
    """(bytes, multiply-adds) of linears of cross-attention layers, but those that make keys and values of pictures."""
    for layer in decoder.layers:
        if isinstance(layer, CrossLayer):
            yield from _linears(layer, but=layer.attention.key_value.weight)


def _expert_sizes(layer: DecoderLayer | CrossLayer) -> Iterator[tuple[int, int, int]]:
    """(bytes of one, how many a token is sent to, how many there are) of the weights of a layer's experts."""
    if isinstance(layer.mlp, SparseMlp):
        for experts in (layer.mlp.experts.gate_up.value, layer.mlp.experts.down.value):
            yield experts.data[0].nbytes, layer.mlp.config.experts_per_token, len(experts.data)


def _size_bytes(weight: PackedWeight) -> int:
    return weight.data.nbytes + (0 if weight.bias is None else weight.bias.nbytes)
