"""A "language model" whose recurrent layers keep a hash of all tokens so far in the slots they are told to.

It runs in the real runner and checks what it is given: a state that was never written, one of other tokens than those
in the sequence's pages, or a slot that two sequences use at once fail the step. Logits come from the states and the
pages. `answer` is the same without slots, pages, batches and drafts.
"""

import hashlib
import itertools

import numpy as np
import torch
from mock_model import EOS, VOCABULARY_SIZE, _choose, check_no_pages_are_held, logits_of, make_core

from tilewright.engine.core import EngineCore
from tilewright.engine.kv.state import StateMemory
from tilewright.engine.load.assembly import make_executor, make_step_layout
from tilewright.engine.run.inputs import StepInputs
from tilewright.engine.run.runner import ModelRunner
from tilewright.engine.schedule.sequence import Sequence
from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.models.protocol import StateSpec
from tilewright.types import ModelInputs, SamplingParams

# The hash of each layer and head is modulo a prime of its own: its steps stay exact in fp32.
PRIMES = np.array([[4093, 4091], [4079, 4073]], np.int64)
CONV_ROWS = 3
SPEC = StateSpec(num_layers=2, conv_shape=(CONV_ROWS, 1), delta_shape=(2, 1, 1))


class State:
    """What the layers know of the tokens so far."""

    def __init__(self, hashes=None, recent=None):
        self.hashes = np.ones_like(PRIMES) if hashes is None else hashes
        self.recent = [0] * CONV_ROWS if recent is None else recent

    def absorb(self, token_id: int, positions: np.ndarray) -> None:
        added = token_id + 1 + int(np.dot(positions, np.arange(1, len(positions) + 1)))
        self.hashes = (self.hashes * np.array([[37, 41], [43, 47]]) + added) % PRIMES
        self.recent = [*self.recent[1:], token_id + 1]

    @property
    def key(self):
        return (*self.hashes.reshape(-1).tolist(), *self.recent)

    def logits(self, token_ids: list[int], vocabulary_size: int) -> np.ndarray:
        state = hashlib.blake2b(np.array(self.key).tobytes())
        if vocabulary_size == VOCABULARY_SIZE:
            return logits_of(state, token_ids)
        seed = int.from_bytes(state.digest()[:8], "little")
        return np.random.default_rng(seed).standard_normal(vocabulary_size, np.float32)


class Pages:
    """In the place of keys and values: the tokens and their rope positions."""

    def __init__(self, num_pages: int, page_size: int, num_axes: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.tokens = np.full(num_pages * page_size, -1, np.int64)
        self.positions = np.full((num_axes, num_pages * page_size), -1, np.int64)


class RecurrentModel:
    cross_spec = None
    predictor = None
    state_spec = SPEC

    def __init__(self, vocabulary_size=VOCABULARY_SIZE, num_axes=3):
        self.vocab_size = vocabulary_size
        self.num_position_axes = num_axes
        self.num_computed = 0  # tokens
        self.fails_at: int | None = None  # raises in the middle of the batch that would compute more tokens in all

    def forward(self, batch):
        states, (pages,) = batch.states, batch.kv_caches
        starts = batch.query_starts.tolist()
        self._check_slots(states, starts)
        pages.tokens[batch.slots_T.numpy()] = batch.token_ids_T.numpy()
        pages.positions[:, batch.slots_T.numpy()] = batch.positions_AT.numpy()
        logits = []
        for index, (begin, end) in enumerate(itertools.pairwise(starts)):
            size, length = pages.page_size, int(batch.kv_lengths[index])
            places = np.arange(length)
            slots = batch.block_table[index].numpy()[places // size].astype(np.int64) * size + places % size
            token_ids, positions = pages.tokens[slots], pages.positions[:, slots]
            first = length - (end - begin)
            state = self._read(states, int(states.read_slots[index]))
            expected = State()
            for place in range(first):
                expected.absorb(int(token_ids[place]), positions[:, place])
            assert state.key == expected.key, f"sequence {index} goes on from another state than that of {first} tokens"
            for row in range(begin, end):
                place = first + row - begin
                state.absorb(int(batch.token_ids_T[row]), batch.positions_AT[:, row].numpy())
                self._write(states, int(states.write_slots[row]), state)
                self.num_computed += 1
                if self.fails_at is not None and self.num_computed > self.fails_at:
                    raise RuntimeError("out of luck")
                logits.append(state.logits(token_ids[: place + 1].tolist(), self.vocab_size))
        rows = torch.from_numpy(np.stack(logits))
        return rows if batch.logit_rows is None else rows[batch.logit_rows]

    def _check_slots(self, states, starts):
        written = {}
        for index, (begin, end) in enumerate(itertools.pairwise(starts)):
            for slot in states.write_slots[begin:end].tolist():
                if slot >= 0:
                    assert slot not in written, f"slot {slot} is written twice"
                    written[slot] = index
        for index, slot in enumerate(states.read_slots.tolist()):
            assert written.get(slot, index) == index, f"slot {slot} is read, and written by another sequence"

    def _read(self, states, slot):
        if slot < 0:
            return State()
        hashes = np.stack([layer[slot].numpy().reshape(-1) for layer in states.delta_states])
        recent = [layer[slot].reshape(-1).tolist() for layer in states.conv_states]
        assert not np.isnan(hashes).any() and recent[0] == recent[1], f"slot {slot} was never written"
        return State(hashes.astype(np.int64), [int(token) for token in recent[0]])

    def _write(self, states, slot, state):
        if slot < 0:
            return
        for layer in range(SPEC.num_layers):
            states.delta_states[layer][slot] = torch.from_numpy(state.hashes[layer].astype(np.float32)).view(2, 1, 1)
            states.conv_states[layer][slot] = torch.tensor(state.recent, dtype=torch.float32).view(CONV_ROWS, 1)


def recurrent_core(
    num_pages=64, page_size=4, num_slots=32, *, vocabulary_size=VOCABULARY_SIZE, num_axes=3, **options
) -> EngineCore:
    def make_runner(resources, limits):
        states = StateMemory(SPEC, num_slots, torch.float32)
        for layer in (*states.conv_states, *states.delta_states):
            layer.fill_(float("nan"))
        model, pages = RecurrentModel(vocabulary_size, num_axes), Pages(num_pages, page_size, num_axes)
        inputs = StepInputs(make_step_layout(resources, limits, num_axes))
        buffer = MediaBuffer(1, torch.float32, 1 << 16)
        runner = ModelRunner(model, [pages], inputs, limits, states=states, media_rows=buffer.rows, replay=False)
        return make_executor(resources, runner, buffer)

    return make_core(
        num_pages,
        page_size,
        make_runner=make_runner,
        num_state_slots=num_slots,
        num_cross_pages=0,
        vocabulary_size=vocabulary_size,
        **options,
    )


def answer(inputs: ModelInputs, params: SamplingParams, index=0, max_context=10_000) -> list[int]:
    """The output of answer `index`, computed token by token in one piece."""
    state = State()
    token_ids = list(inputs.token_ids)
    num_prompt = len(token_ids)
    for place, token_id in enumerate(token_ids):
        state.absorb(token_id, inputs.positions[:, place])
    seeded = Sequence("", inputs, params, index=index, seed=params.seed)
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    while True:
        logits = state.logits(token_ids, VOCABULARY_SIZE)
        token_ids.append(_choose(logits, token_ids, num_prompt, params, stop_ids, seeded))
        num_output = len(token_ids) - num_prompt
        if token_ids[-1] in stop_ids and num_output >= params.min_tokens:
            break
        if len(token_ids) >= max_context or num_output == params.max_tokens:
            break
        position = inputs.next_position + num_output - 1
        state.absorb(token_ids[-1], np.full(len(inputs.positions), position, np.int64))
    return token_ids[num_prompt:]


def check_nothing_is_held(core: EngineCore) -> None:
    """That all pages and slots are free or findable, and every snapshot has its page."""
    scheduler, states = core.scheduler, core.resources.states
    check_no_pages_are_held(core)
    assert states.num_running == states.num_used == 0 and not any(states._slots._references)
    assert states.num_free == states.num_slots == len(states._slots._empty) + states.num_snapshots
    assert sorted([*states._slots._empty, *states._slots._reusable]) == list(range(states.num_slots))
    assert set(states._slots._page_by_digest) <= set(scheduler.resources.kv.pool._page_by_digest)
    scheduler.resources.kv.pool.clear()
    assert states.num_snapshots == 0 and len(states._slots._empty) == states.num_slots
