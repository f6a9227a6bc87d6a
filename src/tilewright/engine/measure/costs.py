"""The least that a model's steps must read and compute, by its sizes: the roofline they are compared with."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from tilewright.engine.schedule.step import Chunk, DraftInput
from tilewright.models.protocol import KvSpec, Model


@dataclass(frozen=True)
class DraftCosts:
    """Costs of a multi-token predictor. The head is the model's: it counts once for each draft."""

    weight_bytes: int  # per pass, without experts
    head_bytes: int
    expert_bytes_per_draft: int
    kv_bytes_per_token: int
    flops_per_token: int  # per token read: its key and value, and the projections before them
    flops_per_draft: int
    flops_per_pair: int  # per query and key

    def read(self, num_passes: int, num_drafting_passes: int, num_drafts: int, num_keys: int) -> int:
        """Return the bytes that passes read at least, with `num_keys` keys in all of them."""
        weights = num_passes * self.weight_bytes + num_drafting_passes * self.head_bytes
        return weights + num_drafts * self.expert_bytes_per_draft + num_keys * self.kv_bytes_per_token

    def computed(self, num_tokens: int, num_drafts: int, num_pairs: int) -> int:
        """Return the operations of passes, a multiply-add counted as two."""
        return num_tokens * self.flops_per_token + num_drafts * self.flops_per_draft + num_pairs * self.flops_per_pair


@dataclass(frozen=True)
class Costs:
    """Costs of the text model, without a vision tower.

    Cross-attention layers, which only tokens that see encoder states go through, are counted separately (`cross_...`).
    The tower's work and the keys and values of images, computed once per image, are not counted.
    """

    weight_bytes_per_step: int  # of a step with one token: each packed weight once, only the selected experts
    expert_bytes_per_token: int  # the part that a further token, with other experts, reads in addition
    expert_bytes: int  # of all experts of all layers
    kv_bytes_per_token: int
    linear_flops_per_token: int  # without the head, which only sampled tokens need
    head_flops: int
    attention_flops_per_pair: int  # of one query and one key, over all layers
    state_bytes_per_sequence: int = 0  # in recurrent layers
    cross_bytes_per_step: int = 0  # of cross-attention layers
    cross_bytes_per_state: int = 0  # keys and values there of one encoder state
    cross_linear_flops_per_token: int = 0
    cross_flops_per_pair: int = 0  # of one query and one encoder state
    draft: DraftCosts | None = None  # of a predictor, not included in the rest

    def decode_bytes(self, context: int, num_states: int = 0) -> int:
        """Return the bytes a step reads for one sequence of `context` tokens that sees `num_states` encoder states."""
        own = context * self.kv_bytes_per_token + self.state_bytes_per_sequence
        return self.weight_bytes_per_step + own + self.cross_attention_bytes(num_states)

    def cross_attention_bytes(self, num_states: int) -> int:
        """Return the bytes that cross-attention layers read in a step that sees `num_states` encoder states in all."""
        return self.cross_bytes_per_step + num_states * self.cross_bytes_per_state if num_states else 0

    def step_bytes(self, num_tokens: int, num_keys: int, num_sequences: int, num_states: int = 0) -> int:
        """Return the bytes a step of many tokens reads at least, with `num_keys` tokens in its sequences' pages."""
        experts = min(self.expert_bytes, num_tokens * self.expert_bytes_per_token)
        dense = self.weight_bytes_per_step - self.expert_bytes_per_token
        own = num_keys * self.kv_bytes_per_token + num_sequences * self.state_bytes_per_sequence
        return dense + experts + own + self.cross_attention_bytes(num_states)

    def step_flops(self, num_tokens: int, num_logits: int, num_pairs: int) -> int:
        """Return the operations of a step with `num_pairs` pairs of a query and a key, without cross-attention."""
        linears = num_tokens * self.linear_flops_per_token + num_logits * self.head_flops
        return linears + num_pairs * self.attention_flops_per_pair

    def cross_attention_flops(self, num_tokens: int, num_pairs: int) -> int:
        """Return the operations of cross-attention layers with `num_pairs` pairs of a query and a state."""
        return num_tokens * self.cross_linear_flops_per_token + num_pairs * self.cross_flops_per_pair

    def prefill_flops(self, num_tokens: int) -> int:
        """Return the operations of all linears over a prompt, and of the head once; `attention_flops` come on top."""
        return num_tokens * self.linear_flops_per_token + self.head_flops

    def attention_flops(self, num_tokens: int) -> int:
        """Return the operations of a prompt's causal attention."""
        return self.attention_flops_per_pair * num_tokens * (num_tokens + 1) // 2


def costs_of(model: Model, kv_itemsize: int, byte_dtype: torch.dtype | None = None) -> Costs:
    """Return the costs of a loaded model; `byte_dtype` is the 8-bit type of keys and values, if they have one."""
    cost, cross_spec, state_spec = model.cost(), model.cross_spec, model.state_spec
    draft = _draft_costs(model, kv_itemsize, byte_dtype)
    kv_bytes = model.kv_spec.bytes_per_token(kv_itemsize, byte_dtype)
    return Costs(
        weight_bytes_per_step=cost.head.weight_bytes + cost.layers.weight_bytes,
        expert_bytes_per_token=cost.layers.expert_bytes_per_token,
        expert_bytes=cost.layers.expert_bytes,
        # The last layer of the KV cache is the predictor's, where there is one.
        kv_bytes_per_token=kv_bytes - (draft.kv_bytes_per_token if draft else 0),
        linear_flops_per_token=2 * cost.layers.multiply_adds,
        head_flops=2 * cost.head.multiply_adds,
        attention_flops_per_pair=2 * cost.multiply_adds_per_pair,
        state_bytes_per_sequence=state_spec.bytes_per_slot(kv_itemsize) if state_spec else 0,
        cross_bytes_per_step=cost.cross_layers.weight_bytes,
        cross_bytes_per_state=cross_spec.bytes_per_token(kv_itemsize, byte_dtype) if cross_spec else 0,
        cross_linear_flops_per_token=2 * cost.cross_layers.multiply_adds,
        cross_flops_per_pair=2 * cost.cross_multiply_adds_per_pair,
        draft=draft,
    )


def _draft_costs(model: Model, kv_itemsize: int, byte_dtype: torch.dtype | None) -> DraftCosts | None:
    if model.predictor is None:
        return None
    head, predictor = model.cost().head, model.predictor.draft_cost()
    both = predictor.keys + predictor.rest
    return DraftCosts(
        weight_bytes=both.weight_bytes - both.expert_bytes_per_token,
        head_bytes=head.weight_bytes,
        expert_bytes_per_draft=both.expert_bytes_per_token,
        kv_bytes_per_token=KvSpec(model.kv_spec.layers[-1:]).bytes_per_token(kv_itemsize, byte_dtype),
        flops_per_token=2 * predictor.keys.multiply_adds,
        flops_per_draft=2 * (predictor.rest.multiply_adds + head.multiply_adds),
        flops_per_pair=2 * predictor.multiply_adds_per_pair,
    )


def step_cost(costs: Costs, chunks: Items[Chunk], num_logits: int) -> tuple[int, int]:
    """Return the bytes that a step of these chunks reads at least, and its operations."""
    if not chunks:  # a step that only encodes media
        return 0, 0
    num_tokens = num_keys = num_pairs = 0
    for chunk in chunks:
        num_tokens += chunk.num_tokens
        num_keys += chunk.stop
        # A query sees the keys up to its own; the queries of a chunk are the last tokens so far.
        num_pairs += chunk.num_tokens * (chunk.start + chunk.stop + 1) // 2
    spans = [
        span
        for chunk in chunks
        if chunk.sequence.cross_groups
        for span in chunk.sequence.cross_spans(chunk.start, chunk.stop)
    ]
    num_cross_tokens = sum(span.stop - span.start for span in spans)
    num_cross_pairs = sum((span.stop - span.start) * span.num_states for span in spans)
    num_states = sum(span.num_states for span in spans)
    read_bytes = costs.step_bytes(num_tokens, num_keys, len(chunks), num_states)
    flops = costs.step_flops(num_tokens, num_logits, num_pairs)
    return read_bytes, flops + costs.cross_attention_flops(num_cross_tokens, num_cross_pairs)


def draft_cost(costs: DraftCosts, draft_inputs: Items[DraftInput]) -> tuple[int, int]:
    """Return the bytes and operations of the predictor's passes after a step.

    The first pass covers all its tokens, each further one a draft per sequence.
    """
    if not draft_inputs:
        return 0, 0
    most_drafts = max(item.num_drafts for item in draft_inputs)
    num_drafts = sum(item.num_drafts for item in draft_inputs)
    num_more = sum(max(0, item.num_drafts - 1) for item in draft_inputs)
    num_keys = sum(item.stop * max(1, item.num_drafts) for item in draft_inputs)
    first_pairs = sum(item.num_tokens * (item.start + item.stop + 1) // 2 for item in draft_inputs)
    num_pairs = first_pairs + num_keys - sum(item.stop for item in draft_inputs)
    read_bytes = costs.read(max(1, most_drafts), most_drafts, num_drafts, num_keys)
    return read_bytes, costs.computed(sum(item.num_tokens for item in draft_inputs) + num_more, num_drafts, num_pairs)
