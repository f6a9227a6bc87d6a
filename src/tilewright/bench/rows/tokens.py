"""Rows of embeddings, and of the ops from logits to tokens: masks, sampling, log-probabilities."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tilewright.bench.row import Calls, Row, close, random, rotation
from tilewright.bench.shapes import MODELS
from tilewright.ops import embedding, sample
from tilewright.ops.linear import pack_weight
from tilewright.ops.torch_backend import embedding as reference
from tilewright.ops.torch_backend import sample as sample_reference

TOKENS = 1024


def embedding_rows() -> Iterator[Row]:
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


BATCH = 8
TEMPERATURE, TOP_K, TOP_P = 0.7, 20, 0.8
TOP_N = 5


def sample_rows() -> Iterator[Row]:
    vocabulary = MODELS[0].vocabulary
    elements = BATCH * vocabulary
    shape = f"[{BATCH}, {vocabulary}]"
    yield Row("sample greedy", shape, 4 * elements, elements, partial(_sample, vocabulary, 0.0, 0, 1.0))
    make = partial(_sample, vocabulary, TEMPERATURE, TOP_K, TOP_P)
    yield Row(f"sample top_k {TOP_K} top_p {TOP_P}", shape, 4 * elements, 20 * elements, make)
    make = partial(_sample, vocabulary, TEMPERATURE, 0, TOP_P)
    yield Row(f"sample top_p {TOP_P}", shape, 4 * elements, 20 * elements, make)
    yield Row("mask", shape, 6 * elements, elements, partial(_mask, vocabulary))
    yield Row(f"log_probs top {TOP_N}", shape, 4 * elements, 20 * elements, partial(_log_probs, vocabulary))


def _mask(vocabulary: int) -> Calls:
    """Return calls with half of the mask's words 0, for which logits are only written; torch gets an unpacked mask."""
    logits, sample_rows = random(BATCH, vocabulary, dtype=torch.float32), torch.arange(BATCH)
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (BATCH, -(-vocabulary // 32)), generator=generator).int()
    words[:, ::2] = 0
    forbidden = sample_reference.mask(torch.zeros_like(logits), sample_rows, words) == -torch.inf

    def check() -> bool:
        return torch.equal(
            sample.mask(logits.clone(), sample_rows, words), sample_reference.mask(logits.clone(), sample_rows, words)
        )

    return Calls(
        lambda _: sample.mask(logits, sample_rows, words), lambda _: logits.masked_fill_(forbidden, -torch.inf), check
    )


def _sample(vocabulary: int, temperature: float, top_k: int, top_p: float) -> Calls:
    logits = random(BATCH, vocabulary, dtype=torch.float32, scale=3.0)
    limits = (
        torch.full((BATCH,), temperature),
        torch.full((BATCH,), top_k),
        torch.full((BATCH,), top_p),
        torch.zeros(BATCH),
    )
    uniform = torch.linspace(0.05, 0.95, BATCH, dtype=torch.float64)
    out = torch.empty(BATCH, dtype=torch.int64)

    def theirs(_: int) -> Tensor:
        return logits.argmax(1) if temperature == 0 else _drawn(logits / temperature, top_k, top_p)

    def check() -> bool:
        return torch.equal(sample.sample(logits, *limits, uniform), sample_reference.sample(logits, *limits, uniform))

    return Calls(lambda _: sample.sample(logits, *limits, uniform, out=out), theirs, check)


def _drawn(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return tokens sampled as by generate() of transformers: each limit writes -inf into the whole row."""
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    ordered, indices = logits.sort(descending=False)
    removed = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    logits = logits.masked_fill(removed.scatter(1, indices, removed), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1)[:, 0]


def _log_probs(vocabulary: int) -> Calls:
    logits = random(BATCH, vocabulary, dtype=torch.float32, scale=3.0)
    token_ids = torch.arange(BATCH) * 1000

    def theirs(_: int) -> object:
        values = logits.log_softmax(-1)
        chosen = values.gather(1, token_ids[:, None])
        return chosen, values.topk(TOP_N), (values > chosen).sum(-1) + 1

    def check() -> bool:
        actual, expected = (
            sample.log_probs(logits, token_ids, TOP_N),
            sample_reference.log_probs(logits, token_ids, TOP_N),
        )
        return all(close(a, b, 0.01) for a, b in zip(actual, expected, strict=True))

    return Calls(lambda _: sample.log_probs(logits, token_ids, TOP_N), theirs, check)
