"""What a step read and computed, by the sizes of the model."""

from __future__ import annotations

from collections.abc import Sequence as Items

from tilewright.engine.costs import Costs, DraftCosts
from tilewright.engine.step import Chunk, DraftInput


def step_cost(costs: Costs, chunks: Items[Chunk], num_logits: int) -> tuple[int, int]:
    """Bytes that a step of these chunks read at least, and the operations it did."""
    if not chunks:  # a step that only encodes
        return 0, 0
    num_tokens = num_keys = num_pairs = 0
    for chunk in chunks:
        num_tokens += chunk.num_tokens
        num_keys += chunk.stop
        # A query sees the keys before it and its own; the queries of a chunk are the last tokens so far.
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
    """The same of the predictor's passes after a step: one over all its tokens, then one for each further draft."""
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
