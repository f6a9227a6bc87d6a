"""Rows of the table of token embeddings, which is split over ranks by tokens."""

from __future__ import annotations

from torch import Tensor

from tilewright.layers import partition
from tilewright.layers.linear import GatheredLinear
from tilewright.ops.embedding import embedding
from tilewright.ops.linear import PackedWeight
from tilewright.weights.spec import Weight
from tilewright.weights.unpacked import Unpacked


class TokenEmbedding:
    """The rows of ids [T, D]. A rank gives zeros for the tokens it does not have; the sum of all ranks is the row."""

    def __init__(self, name: str, num_tokens: int, width: int, head: GatheredLinear | None = None) -> None:
        """Of the tensor `name`, or tied to the head: kept once then, as the head wants it."""
        own = partition.current()
        self.num_tokens = num_tokens if head is None else head.width
        shard = own.width("vocabulary", self.num_tokens)
        self.weight: Weight[PackedWeight] | Weight[Tensor]
        self.weight = Unpacked(f"{name}.weight", num_tokens, width, shard=shard) if head is None else head.weight
        self._first = own.group.rank * shard.length
        self._group = own.group if own.is_split else None

    def __call__(self, ids_T: Tensor) -> Tensor:
        if self._group is None:
            return embedding(ids_T, self.weight.value)
        return self._group.all_reduce(embedding(ids_T, self.weight.value, first=self._first, num_ids=self.num_tokens))
