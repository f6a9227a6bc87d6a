"""Token embeddings from a plain and from a packed table, media embeddings into token rows."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.bench.row import Calls, Row, close, random, rotation
from tilewright.bench.shapes import MODELS
from tilewright.ops import embedding
from tilewright.ops.linear import pack_weight
from tilewright.ops.torch_backend import embedding as reference

TOKENS = 1024


def rows() -> Iterator[Row]:
    for model in MODELS:
        vocabulary, width = model.vocabulary, model.hidden
        moved = 4 * TOKENS * width
        shape = f"{model.name} {TOKENS} of [{vocabulary}, {width}]"
        yield Row("embedding", shape, moved, 0, partial(_embedding, vocabulary, width, False))
        yield Row("embedding packed", shape, moved, 0, partial(_embedding, vocabulary, width, True))
        shape = f"{model.name} {TOKENS} into [{4 * TOKENS}, {width}]"
        yield Row("scatter_rows", shape, moved, 0, partial(_scatter, width, False))
        yield Row("scatter_add_rows", shape, 6 * TOKENS * width, TOKENS * width, partial(_scatter, width, True))


def _some_ids(limit: int, seed: int) -> Tensor:
    return torch.randperm(limit, generator=torch.Generator().manual_seed(seed))[:TOKENS]


def _embedding(vocabulary: int, width: int, packed: bool) -> Calls:
    # The table is far larger than the cache; each call has other ids and reads other rows.
    plain = random(1024, width).repeat(-(-vocabulary // 1024), 1)[:vocabulary]
    table = pack_weight(plain) if packed else plain
    ids = [_some_ids(vocabulary, seed) for seed in range(16)]
    out = torch.empty(TOKENS, width, dtype=plain.dtype)

    def check() -> bool:
        return torch.equal(embedding.embedding(ids[0], table), reference.embedding(ids[0], plain))

    return Calls(
        lambda call: embedding.embedding(ids[call % len(ids)], table, out=out),
        lambda call: functional.embedding(ids[call % len(ids)], plain),
        check,
    )


def _scatter(width: int, accumulate: bool) -> Calls:
    tokens, values = random(4 * TOKENS, width), random(TOKENS, width, seed=1)
    where = _some_ids(4 * TOKENS, 0)
    scatter = embedding.scatter_add_rows if accumulate else embedding.scatter_rows
    twin = reference.scatter_add_rows if accumulate else reference.scatter_rows
    actual, expected = scatter(tokens.clone(), where, values), twin(tokens.clone(), where, values)
    sets = rotation(tokens, values)

    def ours(call: int) -> object:
        out, source = sets[call % len(sets)]
        return scatter(out, where, source)

    def theirs(call: int) -> object:
        out, source = sets[call % len(sets)]
        return out.index_add_(0, where, source) if accumulate else out.index_copy_(0, where, source)

    return Calls(ours, theirs, lambda: close(actual, expected))
