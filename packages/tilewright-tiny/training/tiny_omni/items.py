"""Sounds with one question each, as the sets of validation and test have them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import torch

from tilewright.ops.media import SAMPLE_RATE
from training.tiny_omni.batches import Batch, Take, collate, features_of, takes
from training.tiny_omni.network import Network
from training.tiny_omni.room import worn
from training.tiny_vl.batches import NO_TARGET, Encoder, attention_mask

SILENCE_S = (0.05, 0.8)  # before and behind
BATCH_SIZE = 50


@dataclass(frozen=True)
class Item:
    kind: str
    question: str  # may be empty: then the sound is all there is
    answer: str
    short: str | None  # the same in as few words as may be, which is as right
    samples: np.ndarray  # float32, 16 kHz


def items(set_name: str, count: int) -> Iterator[Item]:
    """The first of a set, each from a seed of its own."""
    for index in range(count):
        rng = Random(f"{set_name} {index}")
        take = next(takes(rng, set_name))
        ask = rng.choice(take.utterance.asks(rng))
        short = take.utterance.answer if ask.kind.startswith("answer") else None
        yield Item(ask.kind, ask.question, ask.answer, short, heard(rng, take))


def heard(rng: Random, take: Take) -> np.ndarray:
    """The take with silence around it, as it sounds in a room."""
    around = [int(rng.uniform(*SILENCE_S) * SAMPLE_RATE) for _ in range(2)]
    samples = np.pad(take.samples.astype(np.float32) / 32768, around)
    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    return worn(torch.from_numpy(samples)[None], generator)[0].numpy()


def validation_batches(encoder: Encoder, count: int) -> list[Batch]:
    """Sentences of the validation set with all that may be asked of them, worn once and for all."""
    rng = Random("validation")
    source = takes(rng, "validation")
    found = sorted((next(source) for _ in range(count)), key=lambda take: len(take.samples))
    batches = []
    for start in range(0, count, BATCH_SIZE):
        batch = collate(rng, encoder, found[start : start + BATCH_SIZE], 0.2, is_casual=False)
        samples = worn(batch.samples.float() / 32768, torch.Generator().manual_seed(start))
        batch.samples = (samples * 32767).to(torch.int16)
        batches.append(batch)
    return batches


@torch.no_grad()
def score(network: Network, batches: list[Batch], device: str) -> dict[str, float]:
    """The share of right answers by kind.

    One is right if each of its tokens is the likeliest after the right ones before it, which is when greedy decoding
    gives exactly this answer.
    """
    right: Counter[str] = Counter()
    asked: dict[str, int] = defaultdict(int)
    for on_host in batches:
        batch = on_host.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            mask = attention_mask(batch.segments)
            hidden, _ = network(features_of(batch.samples), batch.ids, batch.positions, mask, batch.start)
            likeliest = network.lm_head(hidden).argmax(-1)
        is_wrong = ((likeliest != batch.targets) & (batch.targets != NO_TARGET)).cpu()
        for wrong, segments, kinds in zip(is_wrong, on_host.segments, on_host.kinds, strict=True):
            missed = set(segments[wrong].tolist())
            for segment, kind in enumerate(kinds, 1):
                asked[kind] += 1
                right[kind] += segment not in missed
    return {kind: round(right[kind] / number, 4) for kind, number in sorted(asked.items())}
