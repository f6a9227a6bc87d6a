"""How many items of the validation set a network in training answers rightly.

An answer counts if each of its tokens is the likeliest after the right ones before it, which is when greedy decoding
gives exactly this answer. So a forward pass tells, and no text is generated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from random import Random

import torch

from training.tiny_vl.batches import NO_TARGET, Batch, Encoder, as_pixels, attention_mask, collate
from training.tiny_vl.items import Item, validation
from training.tiny_vl.lesson import Ask, Lesson
from training.tiny_vl.network import Network

BATCH_SIZE = 100


def validation_batches(encoder: Encoder, count: int) -> list[tuple[list[str], Batch]]:
    """Items of one shape together, each with the kinds of its items."""
    by_shape: dict[tuple[bool, int], list[Item]] = defaultdict(list)
    for item in validation(count):
        if item.kind != "text":  # whether talk was learned by heart says little; the server's evaluation has it
            by_shape[bool(item.clip), len(item.images or item.clip)].append(item)
    batches = []
    for (is_clip, _), items in by_shape.items():
        for start in range(0, len(items), BATCH_SIZE):
            part = items[start : start + BATCH_SIZE]
            lessons = [Lesson(i.images or i.clip, (Ask(i.kind, i.question, i.answer),), is_clip=is_clip) for i in part]
            batches.append(([item.kind for item in part], collate(_Steady(), encoder, lessons)))
    return batches


class _Steady(Random):
    """No talk, no conversation, clips of two frames a second."""

    def random(self) -> float:
        return 0.99

    def choice(self, seq):  # type: ignore[no-untyped-def]
        return seq[0]


@torch.no_grad()
def score(network: Network, batches: list[tuple[list[str], Batch]], device: str) -> dict[str, float]:
    """The share of right answers by kind."""
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for kinds, on_host in batches:
        batch = on_host.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            hidden = network(
                batch.ids,
                batch.positions,
                attention_mask(batch.segments),
                as_pixels(batch.frames, batch.is_clip),
                batch.slots,
            )
            likeliest = network.logits(hidden).argmax(-1)
        are_right = ((likeliest == batch.targets) | (batch.targets == NO_TARGET)).all(1).tolist()
        asked.update(kinds)
        right.update(kind for kind, is_right in zip(kinds, are_right, strict=True) if is_right)
    return {kind: round(right[kind] / number, 4) for kind, number in sorted(asked.items())}
