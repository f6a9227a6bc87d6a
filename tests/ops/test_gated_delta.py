"""The gated delta rule on both backends and against float64; the projections and the gates."""

from functools import cache

import pytest
import torch
from fuzzing import num_cases
from helpers import assert_close, poisoned, rand
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.bench.rows.gated_delta import chunked_delta_rule
from tilewright.ops import backend, gated_delta, norm
from tilewright.ops.native import kernels
from tilewright.ops.plan import Arena, Plan
from tilewright.ops.torch_backend import gated_delta as reference

# Sequences of a call: decode steps, drafts, chunks with and without a rest, each kind of padding.
LENGTHS = [(1, 1, 1), (4, 1, 0, 12), (64, 65, 3), (150, 1, 70)]
# Key heads, value heads, widths of keys and values.
SPLIT_SHAPES = [(2, 6, 5, 3), (16, 32, 128, 128)]
SHAPES = [(1, 3, 7, 33), (2, 4, 40, 24), (2, 4, 128, 128)]


@pytest.fixture(autouse=True)
def one_torch_thread():
    """float64 goes token by token: a second thread would only be waited for, thousands of times."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Case:
    """Random inputs of a call; slot 0 of the pool stands for all that must stay as it is."""

    def __init__(self, lengths, shape, dtype, *, decay=1.0, seed=0):
        key_heads, value_heads, key_width, value_width = shape
        self.num_tokens, self.lengths = sum(lengths), lengths
        self.q = rand(self.num_tokens, key_heads, key_width, dtype=dtype, seed=seed)
        self.k = rand(self.num_tokens, key_heads, key_width, dtype=dtype, seed=seed + 1)
        self.v = rand(self.num_tokens, value_heads, value_width, dtype=dtype, seed=seed + 2)
        uniform = torch.rand(2, self.num_tokens, value_heads, generator=torch.Generator().manual_seed(seed))
        self.g, self.beta = -decay * uniform[0], uniform[1]
        self.states = rand(2 * len(lengths) + 1, value_heads, key_width, value_width, seed=seed + 3, scale=0.3)
        self.starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        # Slots in no order, and one sequence that begins with nothing.
        slots = 1 + torch.randperm(2 * len(lengths), generator=torch.Generator().manual_seed(seed)).int()
        self.read_slots, self.other_slots = slots[: len(lengths)].contiguous(), slots[len(lengths) :].contiguous()
        if len(lengths) > 1:
            self.read_slots[-1] = -1

    @property
    def inputs(self):
        return self.q, self.k, self.v, self.g, self.beta

    def ours(self, write_slots=None, **kwargs):
        states = self.states.clone()
        out = poisoned(*self.v.shape, dtype=self.v.dtype)
        result = gated_delta.gated_delta_rule(
            *self.inputs, states, self.starts, self.read_slots, write_slots, out=out, **kwargs
        )
        assert result is out
        return out, states

    def in_torch(self, write_slots=None, **kwargs):
        with backend.use("torch"):
            return self.ours(write_slots, **kwargs)

    def truth(self):
        """The recurrence S = exp(g) S; S += k (beta (v - S^T k))^T; out = S^T q / sqrt(K) of one sequence, in fp64."""
        q, k, v = (x.double() for x in self.inputs[:3])
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        group = v.shape[1] // k.shape[1]
        q, k = (x.repeat_interleave(group, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
        states, out = self.states.double(), torch.empty(v.shape, dtype=torch.float64)
        state = states[self.read_slots[0]]
        for token in range(self.num_tokens):
            state = state * self.g[token].double().exp()[:, None, None]
            delta = (v[token] - torch.einsum("hkv,hk->hv", state, k[token])) * self.beta[token].double()[:, None]
            state = state + k[token][:, :, None] * delta[:, None, :]
            out[token] = torch.einsum("hkv,hk->hv", state, q[token])
        states[self.read_slots[0]] = state
        return out, states


@cache  # the same at every ISA level
def truth_of(lengths, shape, dtype, decay):
    return Case(lengths, shape, dtype, decay=decay).truth()


def assert_states_close(actual, expected, dtype):
    # On tiles, bf16 products take the state as two bf16: 16 bits of mantissa.
    tight = dtype == torch.float32
    assert_close(actual, expected, rtol=1e-5 if tight else 1e-4, atol=(2e-5 if tight else 1e-4))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_backends_agree(isa, dtype, lengths, shape):
    case = Case(lengths, shape, dtype)
    out, states = case.ours()
    expected, expected_states = case.in_torch()
    assert_close(out, expected, atol=2e-5 if dtype == torch.float32 else None)
    assert_states_close(states, expected_states, dtype)
    untouched = [slot for slot in range(len(states)) if slot not in case.read_slots.tolist()]
    assert torch.equal(states[untouched], case.states[untouched])


@pytest.mark.parametrize("lengths", [[4, 1, 3], [40, 5, 70]], ids=str)
def test_keeps_the_state_after_each_token_that_has_a_slot(isa, dtype, lengths):
    case = Case(lengths, (1, 2, 32, 40), dtype)
    case.states = rand(case.num_tokens + 4, 2, 32, 40, scale=0.3, seed=9)
    write_slots = torch.full((case.num_tokens,), -1, dtype=torch.int32)
    kept = [token for token in range(case.num_tokens) if token % 3 != 1]
    write_slots[kept] = torch.arange(len(kept)).int() + 4
    case.read_slots = torch.tensor([1, 2, 3], dtype=torch.int32)
    write_slots[0] = 1  # over its own state, which later tokens of the sequence do not read again
    (out, states), (expected, expected_states) = case.ours(write_slots), case.in_torch(write_slots)
    assert_close(out, expected, atol=2e-5 if dtype == torch.float32 else None)
    assert_states_close(states, expected_states, dtype)


def test_a_refused_draft_leaves_the_states_to_go_back_to(isa):
    """Three drafted tokens of which one is accepted: going on from its slot is as if the others had never been."""
    case = Case([4, 4], (1, 2, 64, 64), torch.float32)
    write_slots = torch.tensor([5, 6, 7, 8, 9, 10, 11, 12], dtype=torch.int32)
    case.states = rand(13, 2, 64, 64, scale=0.3)
    case.read_slots = torch.tensor([1, 2], dtype=torch.int32)
    states = case.states.clone()
    gated_delta.gated_delta_rule(*case.inputs, states, case.starts, case.read_slots, write_slots)
    assert torch.equal(states[1:3], case.states[1:3])
    short = Case([2, 2], (1, 2, 64, 64), torch.float32)
    first_two = torch.tensor([0, 1, 4, 5])
    short.q, short.k, short.v, short.g, short.beta = (x[first_two].contiguous() for x in case.inputs)
    short.states, short.read_slots = case.states, case.read_slots
    _, expected = short.ours()
    assert_close(states[[6, 10]], expected[[1, 2]])


def test_the_torch_backend_keeps_what_is_no_number_in_its_sequence():
    """Sequences share a chunk, and with it products: those of others times 0 must stay 0."""
    case = Case([3, 4, 3], (1, 2, 16, 16), torch.float32)
    expected, expected_states = case.in_torch()
    case.v[4] = torch.nan  # the second of the second sequence
    out, states = case.in_torch()
    bad = torch.tensor([4, 5, 6])
    good = torch.tensor([0, 1, 2, 3, 7, 8, 9])
    assert out[bad].isnan().all() and torch.equal(out[good], expected[good])
    slots = case.read_slots.tolist()
    assert states[slots[1]].isnan().all() and torch.equal(states[slots[0]], expected_states[slots[0]])


@pytest.mark.parametrize("normalize,scale", [(False, None), (True, 0.3), (False, 1.0)])
def test_normalize_and_scale(isa, dtype, normalize, scale):
    case = Case([70, 3], (1, 2, 24, 16), dtype, seed=3)
    if not normalize:
        case.k = (case.k.float() / case.k.float().norm(dim=-1, keepdim=True)).to(dtype)
    (out, _), (expected, _) = (call(normalize=normalize, scale=scale) for call in (case.ours, case.in_torch))
    assert_close(out, expected, atol=2e-5 if dtype == torch.float32 else None)


def test_slices_of_a_packed_row(isa, dtype):
    """q, k and v as the convolution gives them, a pool that is one layer of a larger one."""
    case = Case([70, 2], (2, 4, 32, 24), dtype)
    packed = torch.cat([t.reshape(72, -1) for t in (case.q, case.k, case.v)], dim=1)
    q, k, v = packed.split([64, 64, 96], dim=1)
    layers = torch.full((5, 3, 4, 32, 24), float("nan"))
    layers[:, 1] = case.states
    out = gated_delta.gated_delta_rule(
        q.view(72, 2, 32),
        k.view(72, 2, 32),
        v.view(72, 4, 24),
        torch.cat([case.g, case.g], 1)[:, :4],
        case.beta,
        layers[:, 1],
        case.starts,
        case.read_slots,
    )
    plain, states = case.ours()
    assert torch.equal(out, plain)
    assert torch.equal(layers[:, 1], states)
    assert layers[:, ::2].isnan().all()


def relative_error(actual, truth):
    return ((actual.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("decay", [0.01, 1.0, 50.0], ids=lambda decay: f"decay{decay}")
def test_error_against_float64(isa, decay):
    """fp32: within twice the torch chunked form's own; bf16 inputs: the state within 16 bits of mantissa."""
    lengths, shape = (300,), (1, 2, 128, 128)
    case = Case(lengths, shape, torch.float32, decay=decay)
    true_out, true_states = truth_of(lengths, shape, torch.float32, decay)
    slot = case.read_slots[0]
    out, states = case.ours()
    torch_out, torch_state = chunked_delta_rule(*case.inputs, case.states[slot])
    assert relative_error(out, true_out) <= 2 * relative_error(torch_out, true_out)
    assert relative_error(states[slot], true_states[slot]) <= 2 * relative_error(torch_state, true_states[slot])

    case = Case(lengths, shape, torch.bfloat16, decay=decay)
    true_out, true_states = truth_of(lengths, shape, torch.bfloat16, decay)
    out, states = case.ours()
    assert relative_error(out, true_out) <= 1.01 * relative_error(true_out.bfloat16(), true_out)
    assert relative_error(states[slot], true_states[slot]) <= 2**-15


def test_no_drift_over_5000_tokens(isa, dtype):
    lengths, shape = (5000,), (1, 1, 64, 32)
    case = Case(lengths, shape, dtype, decay=0.01)
    slot = case.read_slots[0]
    true_out, true_states = truth_of(lengths, shape, dtype, 0.01)
    out, states = case.ours()
    allowed = 1e-5 if dtype == torch.float32 else 2**-15
    assert relative_error(states[slot], true_states[slot]) <= allowed
    late = relative_error(out[-500:], true_out[-500:])
    assert late <= (1e-5 if dtype == torch.float32 else 2**-8)


def test_prefill_is_step_by_step(isa, dtype):
    case = Case([130], (1, 2, 48, 64), dtype, decay=0.2)
    prefill, prefill_states = case.ours()
    states = case.states.clone()
    one = torch.tensor([0, 1], dtype=torch.int32)
    steps = [
        gated_delta.gated_delta_rule(
            *(x[token : token + 1].contiguous() for x in case.inputs), states, one, case.read_slots
        )
        for token in range(case.num_tokens)
    ]
    assert_close(prefill, torch.cat(steps), atol=2e-5 if dtype == torch.float32 else None)
    assert_states_close(prefill_states, states, dtype)


@pytest.mark.parametrize("beta", [0.0, 1e-6, 1.0])
@pytest.mark.parametrize("decay", [0.0, 50.0, 1e4])
def test_extremes_stay_finite_and_right(isa, dtype, decay, beta):
    case = Case([70, 5, 13], (1, 1, 32, 32), dtype)
    case.g = torch.full_like(case.g, -decay)
    case.g[::3] = -0.5  # between tokens that forget all
    case.beta = torch.full_like(case.beta, beta)
    case.k[20:30] = case.k[20]  # the same key again and again: the worst of the triangular system
    (out, states), (expected, expected_states) = case.ours(), case.in_torch()
    assert out.isfinite().all() and states.isfinite().all()
    assert_close(out, expected, atol=2e-5 if dtype == torch.float32 else None)
    assert_states_close(states, expected_states, dtype)


def test_a_token_does_not_depend_on_the_sequences_beside_it_nor_on_threads(isa, dtype):
    case = Case([70, 1, 3, 130], (2, 4, 64, 96), dtype)
    out, states = case.ours()
    try:
        for num_threads in (1, 7):  # 7: states are cut by columns
            kernels.set_num_threads(num_threads)
            again, states_again = case.ours()
            assert torch.equal(out, again) and torch.equal(states, states_again)
    finally:
        kernels.set_num_threads(0)
    for begin, end, slot in zip(
        case.starts[:-1].tolist(), case.starts[1:].tolist(), case.read_slots.tolist(), strict=True
    ):
        alone = gated_delta.gated_delta_rule(
            *(x[begin:end].contiguous() for x in case.inputs),
            case.states.clone(),
            torch.tensor([0, end - begin], dtype=torch.int32),
            torch.tensor([slot], dtype=torch.int32),
        )
        assert torch.equal(alone, out[begin:end])


@settings(max_examples=num_cases(25), deadline=None)
@given(
    lengths=st.lists(st.integers(0, 140), min_size=1, max_size=4),
    key_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    key_width=st.integers(1, 70),
    value_width=st.integers(1, 70),
    wide=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape(lengths, key_heads, group, key_width, value_width, wide, seed):
    dtype = torch.float32 if wide else torch.bfloat16
    case = Case(lengths, (key_heads, key_heads * group, key_width, value_width), dtype, seed=seed)
    (out, states), (expected, expected_states) = case.ours(), case.in_torch()
    assert_close(out, expected, atol=3e-5 if wide else None)
    assert_states_close(states, expected_states, dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 9])
@pytest.mark.parametrize("shape", SPLIT_SHAPES, ids=str)
def test_split_projections(isa, dtype, shape, num_tokens, interleaved):
    key_heads, value_heads, key_width, value_width = shape
    width = 2 * (key_heads * key_width + value_heads * value_width)
    packed = rand(num_tokens, width + 3 + 2 * value_heads, dtype=dtype)
    qkvz, ba = packed[:, 3 : 3 + width], packed[:, 3 + width :]
    expected = reference.split_projections(qkvz, ba, *shape, interleaved=interleaved)
    # Into rows that are wider, whose last elements must stay as they are.
    rows = [poisoned(num_tokens, part.shape[1:].numel() + 5, dtype=dtype) for part in expected]
    out = tuple(row[:, :-5].unflatten(1, part.shape[1:]) for row, part in zip(rows, expected, strict=True))
    parts = gated_delta.split_projections(qkvz, ba, *shape, interleaved=interleaved, out=out)
    assert all(part is own for part, own in zip(parts, out, strict=True))
    for part, right, row in zip(parts, expected, rows, strict=True):
        assert torch.equal(part, right) and row[:, -5:].isnan().all()
    made = gated_delta.split_projections(qkvz, ba, *shape, interleaved=interleaved)
    assert all(torch.equal(part, right) for part, right in zip(made, expected, strict=True))


@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_heads", [7, 33])
def test_gates(isa, dtype, num_heads, parameter_dtype):
    a, b = rand(6, num_heads, dtype=dtype, scale=4), rand(6, num_heads, dtype=dtype, scale=4, seed=1)
    a[0, 0], a[1, 0], b[0, 0], b[1, 0] = 60.0, -60.0, 60.0, -60.0
    a_log, dt_bias = rand(num_heads, dtype=parameter_dtype, seed=2), rand(num_heads, dtype=parameter_dtype, seed=3)
    out = poisoned(6, num_heads), poisoned(6, num_heads)
    g, beta = gated_delta.delta_gates(a, b, a_log, dt_bias, out=out)
    expected_g, expected_beta = reference.delta_gates(a, b, a_log, dt_bias)
    assert g is out[0] and beta is out[1]
    torch.testing.assert_close(g, expected_g, rtol=2e-6, atol=1e-30)
    torch.testing.assert_close(beta, expected_beta, rtol=1e-6, atol=1e-30)


def test_a_layer_is_recorded_and_replayed(dtype):
    """All ops of a layer in a plan: what comes out follows the inputs and the states, which change."""
    case = Case([1, 1], (1, 2, 32, 32), dtype)
    qkvz, ba = rand(2, 2 * 32 + 2 * 64, dtype=dtype, seed=5), rand(2, 4, dtype=dtype, seed=6)
    parameters, weight = rand(2, seed=7), rand(32, seed=8)

    def layer(states):
        qkv, z, b, a = gated_delta.split_projections(qkvz, ba, 1, 2, 32, 32, interleaved=True)
        g, beta = gated_delta.delta_gates(a, b, parameters, parameters)
        q, k, v = (x.unflatten(1, (-1, 32)) for x in qkv.split([32, 32, 64], dim=1))
        out = gated_delta.gated_delta_rule(q, k, v, g, beta, states, case.starts, case.read_slots)
        return norm.rms_norm(out, weight, 1e-6, gate=z)

    plan, states = Plan(Arena()), case.states.clone()
    with plan.record():
        recorded = layer(states)
    assert plan.num_calls == 4
    expected_states = case.states.clone()
    layer(expected_states)
    for seed in (10, 11):
        qkvz.copy_(rand(*qkvz.shape, dtype=dtype, seed=seed))
        plan.replay()
        assert torch.equal(recorded, layer(expected_states))
        assert torch.equal(states, expected_states)


def test_errors_name_the_tensor():
    case = Case([3], (2, 4, 8, 8), torch.float32)
    starts, slots = case.starts, case.read_slots

    def call(q=case.q, states=case.states, starts=starts, read=slots, write=None):
        gated_delta.gated_delta_rule(q, case.k, case.v, case.g, case.beta, states, starts, read, write)

    with pytest.raises(ValueError, match=r"k is float32, expected bfloat16 as q"):
        call(q=case.q.bfloat16())
    with pytest.raises(ValueError, match=r"states has shape \[3, 4, 8, 7\], expected \[_, H=4, K=8, V=8\]"):
        call(states=torch.zeros(3, 4, 8, 7))
    with pytest.raises(ValueError, match="the state of a slot must be contiguous"):
        call(states=torch.zeros(3, 4, 8, 9)[..., :8])
    with pytest.raises(ValueError, match=r"starts\[-1\] is 4, expected the 3 tokens"):
        call(starts=torch.tensor([0, 4], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"read_slots\[0\] is 3, the pool has 3 slots"):
        call(read=torch.tensor([3], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"write_slots\[1\] is 9, the pool has 3 slots"):
        call(write=torch.tensor([0, 9, 0], dtype=torch.int32))
    with pytest.raises(ValueError, match="there are 4 value heads, expected a multiple of the 3 key heads"):
        gated_delta.gated_delta_rule(
            torch.zeros(3, 3, 8), torch.zeros(3, 3, 8), case.v, case.g, case.beta, case.states, starts, slots
        )
    with pytest.raises(ValueError, match=r"qkvz has shape \[2, 31\], expected \[T, GK\+GK\+HV\+HV=32\]"):
        gated_delta.split_projections(torch.zeros(2, 31), torch.zeros(2, 4), 1, 2, 4, 6, interleaved=True)
    with pytest.raises(ValueError, match=r"a_log has shape \[3\], expected \[H=4\]"):
        gated_delta.delta_gates(torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(3), torch.zeros(4))
