"""Several prompts as one packed batch, for text encoders that keep no cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.layers.batch import starts_of
from tilewright.ops import backend


@dataclass(frozen=True)
class PackedPrompts:
    """Token ids of all prompts one after the other: T in all, of which prompt b has those from starts[b] on."""

    ids_T: Tensor  # int64
    positions_T: Tensor  # int64, of each within its prompt
    starts: Tensor  # int32 [B + 1]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, token_ids: Sequence[Sequence[int]]) -> PackedPrompts:
        lengths = tuple(map(len, token_ids))
        assert lengths, "no prompt to encode"
        assert min(lengths) > 0, "a prompt without tokens: tokenizers of text encoders add an end at least"
        device = backend.device()
        return cls(
            torch.tensor(list(itertools.chain(*token_ids)), dtype=torch.int64, device=device),
            torch.cat([torch.arange(length) for length in lengths]).to(device),
            starts_of(lengths),
            lengths,
        )

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def split(self, x_TD: Tensor) -> list[Tensor]:
        """The rows of each prompt."""
        return list(x_TD.split(self.lengths))
