"""A "language model" without arithmetic: each slot of its KV cache holds a hash of all the slots before it.

It reads them through the pages of the sequence, so a wrong page, a stale one, a wrong border of a chunk or a draft that
was not taken back changes every token after it; and what tokens look at through the pages of groups. `answer` is the
same without pages, batches, caches and drafts.
"""

import dataclasses
import functools
import hashlib

import numpy as np
import torch

from tilewright.engine.core import EngineCore
from tilewright.engine.draft.drafter import PromptLookupDrafter
from tilewright.engine.load.assembly import build_resources
from tilewright.engine.sample.sampler import Sampler, uniform
from tilewright.engine.schedule.resources import SequenceResources
from tilewright.engine.schedule.scheduler import Scheduler
from tilewright.engine.schedule.sequence import Sequence
from tilewright.engine.schedule.step import StepLimits
from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.ops import sample as ops
from tilewright.types import Medium, ModelInputs, Region, SamplingParams, Span

VOCABULARY_SIZE = 24
EOS = 0
PLACEHOLDER = 23
NOT_WRITTEN = -(2**62)
NO_ROWS = Region(-1, 0)
NOTHING = np.empty(0, np.int64)

_table = np.random.default_rng(0).normal(0.0, 2.0, (61, VOCABULARY_SIZE)).astype(np.float32)


def features_of(key: bytes, count: int) -> torch.Tensor:
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little")
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 2)).astype(np.float32))


def states_of(key: bytes, count: int) -> np.ndarray:
    """What is kept of a picture that tokens look at."""
    return features_of(key, count).sum(1).numpy().view(np.int32).astype(np.int64)


def absorb(state, token_id: int, feature, positions: np.ndarray, seen: np.ndarray = NOTHING) -> int:
    """The content of a token's slot; `state` has read all the slots before it and reads this one too."""
    read = state.copy()
    read.update(np.ascontiguousarray(seen).tobytes())
    read.update(np.int64(token_id).tobytes() if feature is None else feature.numpy().tobytes())
    read.update(np.ascontiguousarray(positions).tobytes())
    value = int.from_bytes(read.digest()[:7], "little")
    state.update(np.int64(value).tobytes())
    return value


def logits_of(state, token_ids: list[int]) -> np.ndarray:
    """Noise, but three times out of four what followed the last two tokens before is likely: so drafts may be right."""
    value = int.from_bytes(state.digest()[:7], "little")
    logits = np.roll(_table[value % len(_table)], (value >> 20) % VOCABULARY_SIZE)
    if value % 4:
        for index in range(len(token_ids) - 3, -1, -1):
            if token_ids[index : index + 2] == token_ids[-2:]:
                logits[token_ids[index + 2]] += 12.0
                break
    return logits


class Wrong(BaseException):
    """A check that failed: no Exception, which the engine would take for a request's own fault."""


def loud(check):
    @functools.wraps(check)
    def checked(*arguments):
        try:
            return check(*arguments)
        except AssertionError as error:
            raise Wrong(str(error)) from error

    return checked


class MockRunner:
    """Checks what it is given, as well as computing it."""

    def __init__(self, resources: SequenceResources, limits: StepLimits) -> None:
        self.pool = pool = resources.kv.pool
        self.features = resources.media.features
        self.encoded = {}  # features by key
        self.cross_cache = cross_cache = resources.media.cross_cache
        self.states = np.full((cross_cache.num_pages, cross_cache.page_size), NOT_WRITTEN, np.int64)
        self.limits = limits
        self.media_buffer = MediaBuffer(1, torch.float32, 1 << 16)
        self.values = np.full((pool.num_pages, pool.page_size), NOT_WRITTEN, np.int64)
        self.tokens = np.full((pool.num_pages, pool.page_size), NOT_WRITTEN, np.int64)
        self.windows = {  # the values again, in the pages of layers that see a window
            window: (cache.pool, np.full((cache.pool.num_pages, pool.page_size), NOT_WRITTEN, np.int64))
            for window, cache in resources.windows.items()
        }
        self.steps = []
        self.num_encoded = 0

    @loud
    def run(self, step):
        self.steps.append([(chunk.sequence, chunk.start, chunk.num_tokens) for chunk in step.chunks])
        assert step.chunks and step.num_tokens <= self.limits.max_tokens_per_step
        assert len({chunk.sequence for chunk in step.chunks}) == len(step.chunks) <= self.limits.max_sequences
        self.encode(step.encode)
        self._fill(step.cross_groups)
        logits = [row for chunk in step.chunks for row in self._compute(chunk)]
        assert len(logits) == step.num_logits
        return torch.from_numpy(np.stack(logits)) if logits else torch.empty(0, VOCABULARY_SIZE)

    @loud
    def encode(self, media):
        num_patches = sum(medium.encoder_rows for medium in media)
        assert len(media) <= 1 or num_patches <= self.limits.max_encode_patches
        for medium in media:
            self.media_buffer.load(medium.region)
            assert not self.features.has(medium.key)
            self.encoded[medium.key] = features_of(medium.key, medium.num_states or medium.num_features)
            self.features.put(medium.key, self.encoded[medium.key].nbytes)
            self.num_encoded += 1

    def _fill(self, groups):
        assert len({group.key for group in groups}) == len(groups)
        for group in groups:
            assert not self.cross_cache.is_filled(group.key)
            for medium in group.media:
                assert len(self._features(medium)) == medium.num_states
            states = np.concatenate([states_of(medium.key, medium.num_states) for medium in group.media])
            self.states.reshape(-1)[self.cross_cache.slots(group.key, group.num_states)] = states
            self.cross_cache.fill(group.key)

    def _features(self, medium):
        assert self.features.has(medium.key)
        self.features.id_of(medium.key)  # as a step's writer asks for it
        return self.encoded[medium.key]

    def _compute(self, chunk):
        sequence, size = chunk.sequence, self.pool.page_size
        assert chunk.start == sequence.num_computed_tokens and len(chunk.token_ids) == chunk.num_tokens > 0
        for page in sequence.pages[chunk.start // size :]:
            assert self.pool._references[page] == 1 and self.pool._digests[page] is None
        known = self.values[sequence.pages].reshape(-1)[: chunk.start]
        token_ids = self.tokens[sequence.pages].reshape(-1)[: chunk.start].tolist()
        assert NOT_WRITTEN not in token_ids
        state = hashlib.blake2b(known.tobytes())
        features = {}
        for span in sequence.feature_spans(chunk.start, chunk.stop):
            for index in range(span.length):
                features[span.start + index] = self._features(span.medium)[span.first_feature + index]
        positions = sequence.positions(chunk.start, chunk.stop)
        seen = {}
        for cross_span in sequence.cross_spans(chunk.start, chunk.stop):
            states = self.states[self.cross_cache.pages(cross_span.group.key)].reshape(-1)[: cross_span.num_states]
            assert NOT_WRITTEN not in states and len(states) == cross_span.num_states
            seen.update(dict.fromkeys(range(cross_span.start, cross_span.stop), states))
        for index, token_id in enumerate(chunk.token_ids):
            position = chunk.start + index
            page = sequence.pages[position // size]
            value = absorb(state, token_id, features.get(position), positions[:, index], seen.get(position, NOTHING))
            self.values[page, position % size] = value
            self.tokens[page, position % size] = token_id
            for window in self.windows:
                self._look_through(sequence, position, window)
            token_ids.append(token_id)
            if index >= chunk.num_tokens - chunk.num_logits:
                yield logits_of(state, token_ids)

    def _look_through(self, sequence, position, window):
        """Writes a token's value to the pages of a window too, where the values of all tokens in it must be."""
        size, held, (pool, values) = self.pool.page_size, sequence.window_pages[window], self.windows[window]
        page = held.pages[position // size - held.first]
        assert pool._references[page] == 1 and pool._digests[page] is None
        values[page, position % size] = self.values[sequence.pages[position // size], position % size]
        first = max(0, position - window + 1)
        assert held.first <= first // size
        for seen in range(first, position + 1):
            kept = values[held.pages[seen // size - held.first], seen % size]
            assert kept == self.values[sequence.pages[seen // size], seen % size]


class LetterDecoder:
    """Token 1 is "a", 2 is "b", and so on."""

    def push(self, token_ids):
        return "".join(chr(96 + token_id) for token_id in token_ids)

    def flush(self):
        return ""


def make_core(
    num_pages=64,
    page_size=4,
    *,
    make_runner=MockRunner,
    num_cross_pages=64,
    num_state_slots=None,
    window_pages=None,
    prefix_cache=True,
    num_drafts=0,
    max_feature_bytes=1 << 20,
    max_context=10_000,
    vocabulary_size=VOCABULARY_SIZE,
    make_token_decoder=LetterDecoder,
    eos_token_ids=(EOS,),
    constraints=None,
    **limits,
) -> EngineCore:
    """The real scheduler, sampler and caches around what `make_runner(resources, limits)` gives."""
    all_limits = StepLimits(max_context=max_context, **limits)
    resources = build_resources(
        all_limits,
        num_pages,
        page_size,
        num_cross_pages=num_cross_pages,
        num_state_slots=num_state_slots,
        window_pages=window_pages,
        prefix_cache=prefix_cache,
        encoder_cache_bytes=max_feature_bytes,
    )
    return EngineCore(
        make_runner(resources, all_limits),
        Scheduler(resources, all_limits, PromptLookupDrafter(num_drafts) if num_drafts else None),
        Sampler(),
        make_token_decoder=make_token_decoder,
        vocabulary_size=vocabulary_size,
        eos_token_ids=eos_token_ids,
        constraints=constraints,
    )


def text_inputs(token_ids) -> ModelInputs:
    token_ids = tuple(token_ids)
    return ModelInputs(token_ids, np.arange(len(token_ids), dtype=np.int64)[None].repeat(3, 0), len(token_ids))


def media_inputs(parts) -> ModelInputs:
    """Parts are tokens, or (key, lengths of spans): a medium, with token 22 between its spans.

    (key, number of states) is one that tokens look at.
    """
    token_ids: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, int):
            token_ids.append(part)
            continue
        key, lengths = part
        if isinstance(lengths, int):
            place = (Span(len(token_ids), 1),)
            token_ids.append(PLACEHOLDER)
            media.append(Medium("image", key, (1, 2, lengths), place, NO_ROWS, 2 * lengths, num_states=lengths))
            continue
        spans = []
        for length in lengths:
            spans.append(Span(len(token_ids), length))
            token_ids += [PLACEHOLDER] * length + [22]
        num_patches = 4 * sum(lengths)
        media.append(Medium("image", key, (1, 2, num_patches // 2), tuple(spans), NO_ROWS, num_patches))
    # Positions that do not follow from the tokens' indices, as with M-RoPE.
    positions = np.stack([np.arange(len(token_ids)), np.arange(len(token_ids)) // 2])
    return ModelInputs(tuple(token_ids), positions.astype(np.int64), len(token_ids) + 3, tuple(media))


def read_by(core: EngineCore, inputs: ModelInputs, read) -> ModelInputs:
    """The inputs with media that `read` is called for when they are encoded."""
    buffer = core.runner.media_buffer
    allocation = buffer.allocate([1] * len(inputs.media))
    for region in allocation.regions:
        buffer.write_later(region, lambda rows: read())
    media = [
        dataclasses.replace(item, region=region) for item, region in zip(inputs.media, allocation.regions, strict=True)
    ]
    return dataclasses.replace(inputs, media=tuple(media), allocation=allocation)


def run_all(core: EngineCore, max_steps=10_000):
    """Every (sequence, Delta) until there is no work."""
    results = []
    for _ in range(max_steps):
        if not core.has_work:
            return results
        result = core.step()
        results += result.deltas
        assert not result.failures, result.failures
    raise AssertionError(f"not done after {max_steps} steps")


def check_no_pages_are_held(core: EngineCore) -> None:
    pools = [core.resources.kv.pool, *(cache.pool for cache in core.resources.windows.values())]
    for pool in pools:
        assert pool.num_used == 0 and not any(pool._references)
        assert sorted([*pool._empty, *pool._reusable]) == list(range(pool.num_pages))


def answer(inputs: ModelInputs, params: SamplingParams, index=0, max_context=10_000) -> list[int]:
    """The output of answer `index`, computed token by token in one piece."""
    feature_of = {}
    looks_from = {medium.spans[0].start: medium for medium in inputs.media if medium.num_states}
    for medium in inputs.media:
        if medium.num_states:
            continue
        rows = iter(features_of(medium.key, medium.num_features))
        for span in medium.spans:
            for position in range(span.start, span.start + span.length):
                feature_of[position] = next(rows)
    state = hashlib.blake2b()
    token_ids = list(inputs.token_ids)
    num_prompt = len(token_ids)
    seen = NOTHING
    for position, token_id in enumerate(token_ids):
        if medium := looks_from.get(position):
            before = seen if position - 1 in looks_from else NOTHING
            seen = np.concatenate([before, states_of(medium.key, medium.num_states)])
        absorb(state, token_id, feature_of.get(position), inputs.positions[:, position], seen)
    seeded = Sequence("", inputs, params, index=index, seed=params.seed)
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    while True:
        token_ids.append(_choose(logits_of(state, token_ids), token_ids, num_prompt, params, stop_ids, seeded))
        num_output = len(token_ids) - num_prompt
        if token_ids[-1] in stop_ids and num_output >= params.min_tokens:
            break
        if len(token_ids) >= max_context or num_output == params.max_tokens:
            break
        next_position = inputs.next_position + num_output - 1
        absorb(state, token_ids[-1], None, np.full(len(inputs.positions), next_position, np.int64), seen)
    return token_ids[num_prompt:]


def _choose(logits, token_ids, num_prompt, params, stop_ids, seeded) -> int:
    logits = torch.from_numpy(logits)
    output = token_ids[num_prompt:]
    for token_id in set(token_ids):
        penalty = params.repetition_penalty
        logits[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty
    for token_id in set(output):
        logits[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    if len(output) < params.min_tokens:
        logits[list(stop_ids)] = -torch.inf
    if params.temperature == 0:
        return int(logits.argmax())
    drawn = ops.sample(
        logits[None],
        torch.tensor([params.temperature]),
        torch.tensor([params.top_k]),
        torch.tensor([params.top_p]),
        torch.tensor([params.min_p]),
        torch.tensor([uniform(seeded, len(token_ids))], dtype=torch.float64),
    )
    return int(drawn[0])
