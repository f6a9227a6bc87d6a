"""Recurrent layers on the real kernels: recorded steps read and write other slots each time they are replayed."""

import pytest
import torch
from mock_model import run_all, text_inputs

from tilewright.engine.load.assembly import build_core
from tilewright.engine.schedule.step import StepLimits
from tilewright.layers.attention import KvLayer
from tilewright.models.protocol import KvSpec, StateSpec
from tilewright.ops.conv import causal_conv
from tilewright.ops.embedding import embedding
from tilewright.ops.gated_delta import delta_gates, gated_delta_rule
from tilewright.ops.linear import linear, pack_weight
from tilewright.types import SamplingParams

VOCABULARY_SIZE, LAYERS, HEADS, WIDTH = 32, 2, 2, 32
CHANNELS = 2 * WIDTH + HEADS * WIDTH  # q and k of one head, v of two
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


class NoText:
    def push(self, token_ids):
        return ""

    def flush(self):
        return ""


class DeltaModel:
    """Two gated delta nets without attention, so that all an answer depends on goes through the states."""

    vocab_size, num_position_axes = VOCABULARY_SIZE, 3
    cross_spec = None
    predictor = None
    kv_spec = KvSpec((KvLayer(1, 32),))
    state_spec = StateSpec(LAYERS, (3, CHANNELS), (HEADS, WIDTH, WIDTH))
    num_embeddings = VOCABULARY_SIZE

    def __init__(self):
        made = torch.Generator().manual_seed(0)

        def random(*shape, scale=1.0):
            return scale * torch.randn(shape, generator=made)

        self.table = random(VOCABULARY_SIZE, CHANNELS)
        self.conv = [random(4, CHANNELS) for _ in range(LAYERS)]
        self.gates = [pack_weight(random(2 * HEADS, CHANNELS, scale=0.1)) for _ in range(LAYERS)]
        self.outputs = [pack_weight(random(CHANNELS, HEADS * WIDTH, scale=0.5)) for _ in range(LAYERS)]
        self.head = pack_weight(random(VOCABULARY_SIZE, CHANNELS))
        self.a_log, self.dt_bias = torch.full((HEADS,), -3.0), torch.zeros(HEADS)

    def forward(self, batch):
        states, starts = batch.states, batch.query_starts
        slots = (starts, states.read_slots, states.write_slots)
        x = embedding(batch.token_ids_T, self.table)
        for layer in range(LAYERS):
            qkv = causal_conv(x, self.conv[layer], states.conv_states[layer], *slots)
            q, k, v = (part.unflatten(1, (-1, WIDTH)) for part in qkv.split([WIDTH, WIDTH, HEADS * WIDTH], 1))
            a, b = linear(x, self.gates[layer]).split(HEADS, 1)
            g, beta = delta_gates(a, b, self.a_log, self.dt_bias)
            out = gated_delta_rule(q, k, v, g, beta, states.delta_states[layer], *slots)
            x = linear(out.flatten(1), self.outputs[layer], residual=x)
        return linear(x if batch.logit_rows is None else x[batch.logit_rows], self.head)


@pytest.fixture(scope="module")
def model():
    return DeltaModel()


def replayed_core(model, *, replay=True, prefix_cache=True, drafts=0, num_pages=64, num_slots=24, **limits):
    core = build_core(
        model,
        torch.float32,
        StepLimits(max_context=512, **limits),
        num_pages,
        num_state_slots=num_slots,
        make_token_decoder=NoText,
        page_size=32,
        speculate=drafts,
        prefix_cache=prefix_cache,
        replay=replay,
    )
    states = core.runner.model_runner.states
    for layer in (*states.conv_states, *states.delta_states):
        layer.fill_(float("nan"))
    return core


PROMPTS = [[1, 2, 3, 4] * 12 + [number] * (3 * number) for number in range(1, 6)]


def answers(core):
    outputs = []
    for prompts in (PROMPTS[:3], PROMPTS):
        sequences = [core.add(str(i), text_inputs(prompt), GREEDY)[0] for i, prompt in enumerate(prompts)]
        run_all(core)
        outputs.append([sequence.output_token_ids for sequence in sequences])
    assert outputs[0] == outputs[1][:3]
    assert core.resources.kv.pool.num_used == core.resources.states.num_used == 0
    return outputs[1]


@pytest.fixture(scope="module")
def alone(model):
    """Token by token, op by op, with nothing cached."""
    core = replayed_core(model, replay=False, prefix_cache=False, max_tokens_per_step=1, max_sequences=1)
    expected = answers(core)
    assert len({tuple(output) for output in expected}) == len(PROMPTS)
    return expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drafts": 4},
        {"drafts": 4, "replay": False},
        {"max_tokens_per_step": 40, "max_sequences": 4, "drafts": 2},
        {"num_pages": 12, "num_slots": 8, "drafts": 3},
        {"num_slots": 1},
    ],
    ids=str,
)
def test_answers_are_those_alone(model, alone, options):
    core = replayed_core(model, **options)
    assert answers(core) == alone
    assert bool(core.runner.model_runner._recorded) == options.get("replay", True)
    if options.get("drafts"):
        assert core.scheduler.drafter.num_accepted > 0
    if "num_slots" not in options:
        assert core.resources.states.num_hits > 0
