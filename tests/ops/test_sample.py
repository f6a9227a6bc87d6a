import math

import pytest
import torch
from fuzzing import num_cases
from helpers import assert_close, poisoned, rand
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.ops import backend, sample
from tilewright.ops.native import kernels
from tilewright.ops.torch_backend import sample as reference

SIZES = [1, 17, 4097]
INFINITY = math.inf


def filters(rows: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> tuple[torch.Tensor, ...]:
    return (
        torch.full((rows,), temperature, dtype=torch.float32),
        torch.full((rows,), top_k, dtype=torch.int64),
        torch.full((rows,), top_p, dtype=torch.float32),
        torch.full((rows,), min_p, dtype=torch.float32),
    )


def uniforms(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_distribution(actual, logits, parameters, rtol=2e-5):
    """That of plain torch, in fp64. A token whose limit is met to within rounding may be kept or not: the kept set
    lies between those of limits a little tighter and a little looser, and the probabilities are those of the set."""
    temperature, top_k, top_p, min_p = parameters
    tight = reference._distribution(logits, temperature, top_k, (top_p - 3e-6).clamp(min=0), min_p * (1 + 1e-4))
    loose = reference._distribution(logits, temperature, top_k, top_p + 3e-6, min_p * (1 - 1e-4))
    kept = actual > 0
    assert (kept >= (tight > 1e-36)).all() and (kept <= (loose > 0)).all()
    expected = loose * kept
    expected /= expected.sum(1, keepdim=True)
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=1e-9)


def assert_same_draw(logits, parameters, uniform):
    """The tokens of the distribution, on both backends, but where uniform is within rounding of the edge of two."""
    cumulative = reference._distribution(logits, *parameters).cumsum(1)
    for draw in (sample.sample, reference.sample):
        for row, token in enumerate(draw(logits, *parameters, uniform).tolist()):
            below = float(cumulative[row, token - 1]) if token else 0.0
            assert below - 1e-5 <= uniform[row] <= float(cumulative[row, token]) + 1e-5, (row, token)


CASES = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 300},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "temperature": 0.7},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.02, "temperature": 1.4},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("size", [17, 4097])
def test_sample_and_its_distribution(isa, dtype, size, case):
    logits = rand(3, size + 3, dtype=dtype, scale=3.0, seed=size)[:, 2:-1]
    parameters = filters(3, **case)
    out = poisoned(3, size)
    assert sample.softmax_probs(logits, *parameters, out=out) is out
    assert_distribution(out, logits, parameters)
    for seed in range(2):
        assert_same_draw(logits, parameters, uniforms(3, seed))


def test_every_row_has_its_own_parameters(isa):
    logits = rand(4, 700, scale=4.0)
    parameters = (
        torch.tensor([1.0, 0.0, 0.5, 2.0]),
        torch.tensor([0, 3, 17, 699]),
        torch.tensor([1.0, 0.5, 0.9, 0.99]),
        torch.tensor([0.2, 0.0, 0.0, 0.001]),
    )
    assert_same_draw(logits, parameters, uniforms(4))
    assert_distribution(sample.softmax_probs(logits, *parameters), logits, parameters)


@pytest.mark.parametrize("size", SIZES)
def test_temperature_zero_is_argmax(isa, dtype, size):
    logits = rand(5, size, dtype=dtype)
    logits[3] = 2.0  # all equal: the first
    logits[4, size // 2 :] = 9.0
    tokens = sample.sample(logits, *filters(5, temperature=0.0), uniforms(5))
    assert torch.equal(tokens, logits.float().argmax(1))
    assert tokens[3] == 0 and tokens[4] == size // 2


def test_ties_at_a_limit_are_kept(isa, dtype):
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 3.0, 2.0, 0.0]], dtype=dtype)
    kept = sample.softmax_probs(logits, *filters(1, top_k=3)) > 0
    assert kept.tolist() == [[False, True, True, True, True, True, False]]
    kept = sample.softmax_probs(logits, *filters(1, top_p=0.3)) > 0
    assert kept.tolist() == [[False, True, False, False, True, False, False]]
    signed_zeros = torch.tensor([[0.0, -0.0, -1.0, 0.0]], dtype=dtype)
    kept = sample.softmax_probs(signed_zeros, *filters(1, top_k=1)) > 0
    assert kept.tolist() == [[True, True, False, True]]


def test_special_values(isa, dtype):
    nan = math.nan
    logits = torch.tensor(
        [
            [nan, 1.0, nan, 2.0, -INFINITY],
            [0.0, INFINITY, 5.0, nan, INFINITY],
            [-INFINITY, nan, -INFINITY, nan, -INFINITY],
            [3.0e38, -3.0e38, 2.0, 1e30, nan],
            [-3.0e38, -3.1e38, -INFINITY, -INFINITY, nan],
        ],
        dtype=dtype,
    )
    for case in CASES:
        parameters = filters(5, **case)
        assert_distribution(sample.softmax_probs(logits, *parameters), logits, parameters)
        for backend_name in backend.NAMES:
            with backend.use(backend_name):
                for uniform in (0.0, 0.5, 1 - 2**-53):
                    tokens = sample.sample(logits, *parameters, torch.full((5,), uniform, dtype=torch.float64)).tolist()
                    assert tokens[0] in (1, 3) and tokens[1] in (1, 4) and tokens[2:] == [0, 0, 0]


def test_the_ends_of_uniform(isa):
    logits = torch.full((2, 1000), -INFINITY)
    logits[:, 100:900] = rand(2, 800)
    first = sample.sample(logits, *filters(2), torch.zeros(2, dtype=torch.float64))
    last = sample.sample(logits, *filters(2), torch.full((2,), 1 - 2**-53, dtype=torch.float64))
    assert first.tolist() == [100, 100] and last.tolist() == [899, 899]


def test_the_draws_follow_the_distribution(isa):
    """Chi-square of 20,000 draws over 32 tokens: 31 degrees of freedom, 61.1 at one in a thousand."""
    draws = 20000
    logits = rand(1, 32, scale=1.5).expand(draws, 32).contiguous()
    tokens = sample.sample(logits, *filters(draws, temperature=0.8), uniforms(draws))
    expected = reference._distribution(logits[:1], *filters(1, temperature=0.8))[0] * draws
    observed = torch.bincount(tokens, minlength=32)
    assert ((observed - expected).square() / expected).sum() < 61.1


def test_a_row_depends_on_nothing_else(isa):
    logits = rand(9, 3000, scale=3.0)
    parameters, uniform = filters(9, top_k=50, top_p=0.9), uniforms(9)
    together = sample.softmax_probs(logits, *parameters)
    tokens = sample.sample(logits, *parameters, uniform)
    for threads in (1, 2, 5):
        kernels.set_num_threads(threads)
        assert torch.equal(sample.softmax_probs(logits, *parameters), together)
        kernels.set_num_threads(0)
    for row in range(9):
        one = [p[row : row + 1] for p in parameters]
        assert torch.equal(sample.softmax_probs(logits[row : row + 1], *one)[0], together[row])
        assert sample.sample(logits[row : row + 1], *one, uniform[row : row + 1]) == tokens[row]


def test_a_large_vocabulary(isa, dtype):
    logits = rand(1, 151_936, dtype=dtype, scale=2.0)
    for case in [{"top_k": 50, "top_p": 0.95}, {"top_k": 20_000}, {"top_p": 0.9}]:
        parameters = filters(1, **case)
        assert_distribution(sample.softmax_probs(logits, *parameters), logits, parameters)
        assert_same_draw(logits, parameters, uniforms(1))


@settings(deadline=None, max_examples=num_cases(150))
@given(
    size=st.integers(1, 700),
    seed=st.integers(0, 10**6),
    scale=st.floats(0.0, 50.0),
    temperature=st.one_of(st.just(0.0), st.floats(1e-3, 100.0)),
    top_k=st.integers(0, 800),
    top_p=st.floats(0.0, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_any_parameters(size, seed, scale, temperature, top_k, top_p, min_p):
    logits = rand(1, size, seed=seed, scale=scale)
    parameters = filters(1, temperature, top_k, top_p, min_p)
    actual = sample.softmax_probs(logits, *parameters)
    assert abs(actual.sum().item() - 1) < 1e-4
    # At low temperatures rounding (x - max) / T costs 6e-8 of an exponent of up to 87.
    assert_distribution(actual, logits, parameters, rtol=1e-4)
    assert_same_draw(logits, parameters, uniforms(1, seed))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("top_n", [0, 32, 4097])
def test_log_probs(isa, dtype, size, top_n):
    top_n = min(top_n, size)
    logits = rand(6, size, dtype=dtype, scale=3.0)
    logits[4] = logits[4].round()  # ties
    logits[5] = 1.5
    token_ids = torch.tensor([0, size - 1, size // 2, size // 3, size // 2, size // 2])
    token, top_ids, top, rank = sample.log_probs(logits, token_ids, top_n)
    expected = reference.log_probs(logits, token_ids, top_n)
    torch.testing.assert_close(token, expected[0], rtol=2e-6, atol=2e-6)
    assert torch.equal(top_ids, expected[1])
    torch.testing.assert_close(top, expected[2], rtol=2e-6, atol=2e-6)
    assert torch.equal(rank, expected[3])


def test_log_probs_of_special_values(isa, dtype):
    logits = torch.tensor(
        [
            [math.nan, 1.0, -INFINITY, 2.0, math.nan],
            [0.0, INFINITY, 5.0, math.nan, INFINITY],
            [-INFINITY, math.nan, -INFINITY, math.nan, -INFINITY],
            [0.0, -0.0, 1.0, -0.0, 0.0],
        ],
        dtype=dtype,
    )
    for chosen in range(5):
        token_ids = torch.full((4,), chosen)
        expected = reference.log_probs(logits, token_ids, 5)
        for actual, want in zip(sample.log_probs(logits, token_ids, 5), expected, strict=True):
            torch.testing.assert_close(actual, want, rtol=1e-6, atol=1e-6)


def penalties(rows: int, size: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    ids, starts = [], [0]
    for row in range(rows):
        count = 0 if row == 1 else int(torch.randint(0, size + 1, (1,), generator=generator))
        ids.append(torch.randperm(size, generator=generator)[:count])
        starts.append(starts[-1] + count)
    return torch.tensor(starts), torch.cat(ids)


@pytest.mark.parametrize("size", SIZES)
def test_penalize(dtype, size):
    logits = rand(4, size + 2, dtype=dtype)[:, 1:-1]
    starts, token_ids = penalties(4, size, seed=1)
    counts = torch.arange(len(token_ids), dtype=torch.int32) % 4
    bias_starts, bias_ids = penalties(4, size, seed=2)
    arguments = (
        starts,
        token_ids,
        counts,
        torch.tensor([1.0, 1.3, 0.7, 2.0]),
        torch.tensor([0.0, 0.5, -0.3, 1.5]),
        torch.tensor([0.2, 0.0, 0.1, -0.4]),
    )
    for bias in ({}, {"bias_starts": bias_starts, "bias_token_ids": bias_ids, "bias": rand(len(bias_ids), scale=9.0)}):
        actual = logits.clone()
        assert sample.penalize(actual, *arguments, **bias) is actual
        assert_close(actual, reference.penalize(logits.clone(), *arguments, **bias))


def test_neutral_penalties_change_nothing(dtype):
    logits = rand(2, 100, dtype=dtype)
    before = logits.clone()
    starts, token_ids = penalties(2, 100, seed=3)
    counts = torch.ones(len(token_ids), dtype=torch.int32)
    sample.penalize(logits, starts, token_ids, counts, torch.ones(2), torch.zeros(2), torch.zeros(2))
    assert torch.equal(logits, before)


def bits(rows: int, words: int, seed: int) -> torch.Tensor:
    """Random words, with whole and empty ones among them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-(2**31), 2**31, (rows, words), generator=generator).int()
    kinds = torch.randint(0, 4, (rows, words), generator=generator)
    return torch.where(kinds == 0, -1, torch.where(kinds == 1, 0, drawn)).int()


@pytest.mark.parametrize("size", [1, 31, 32, 4097, 40_000])
def test_mask(isa, size):
    num_words = -(-size // 32)
    whole = poisoned(6, size + 5)
    logits = whole[1:5, 2:-3]  # whatever it touches beside its rows is NaN no more
    logits[:] = rand(4, size, seed=size)
    logits[0, size // 2] = math.nan
    words = bits(2, num_words + 2, size)[:, :num_words] if size % 2 else bits(2, num_words + 1, size)
    rows = torch.tensor([3, 0])
    expected = reference.mask(logits.clone(), rows, words)
    assert sample.mask(logits, rows, words) is logits
    assert_same_bits(logits, expected)
    for row, word in zip([3, 0], words, strict=True):
        for token in {0, size // 2, size - 1}:
            allowed = int(word[token // 32]) >> token % 32 & 1
            assert allowed or logits[row, token] == -INFINITY
    assert whole[[0, 5]].isnan().all() and whole[:, :2].isnan().all() and whole[:, -3:].isnan().all()


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))


def test_mask_of_all_and_of_nothing(isa):
    logits = rand(3, 100)
    before = logits.clone()
    sample.mask(logits, torch.tensor([0, 2]), torch.tensor([[-1] * 4, [0] * 4], dtype=torch.int32))
    assert torch.equal(logits[:2], before[:2]) and (logits[2] == -INFINITY).all()
    sample.mask(logits, torch.empty(0, dtype=torch.int64), torch.empty(0, 4, dtype=torch.int32))
    assert torch.equal(logits[:2], before[:2])


def test_errors_name_the_value():
    logits, uniform = rand(2, 10), uniforms(2)
    with pytest.raises(ValueError, match=r"sample: temperature\[0\] is -1.0+, expected 0.0+ to 1000000"):
        sample.sample(logits, *filters(2, temperature=-1.0), uniform)
    with pytest.raises(ValueError, match=r"top_p\[0\] is nan"):
        sample.sample(logits, *filters(2, top_p=math.nan), uniform)
    with pytest.raises(ValueError, match=r"top_k\[0\] is -1, expected 0 to"):
        sample.sample(logits, *filters(2, top_k=-1), uniform)
    with pytest.raises(ValueError, match=r"uniform\[0\] is 1.0"):
        sample.sample(logits, *filters(2), torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"min_p has shape \[3\], expected \[B=2\]"):
        sample.sample(logits, *filters(2)[:3], torch.zeros(3), uniform)
    with pytest.raises(ValueError, match=r"log_probs: token_ids\[1\] is 10, the vocabulary has 10 tokens"):
        sample.log_probs(logits, torch.tensor([0, 10]), 1)
    with pytest.raises(ValueError, match="top_n is 11, the vocabulary has 10 tokens"):
        sample.log_probs(logits, torch.tensor([0, 1]), 11)
    one, none = torch.ones(2), torch.zeros(2)
    with pytest.raises(ValueError, match=r"penalize: starts must be B \+ 1 = 3 rising offsets from 0 to 1"):
        sample.penalize(
            logits, torch.tensor([0, 1]), torch.tensor([3]), torch.ones(1, dtype=torch.int32), one, none, none
        )
    words = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"mask: rows\[0\] is 2, logits has 2 rows"):
        sample.mask(logits, torch.tensor([2]), words)
    with pytest.raises(ValueError, match="words has 1 columns of 32 bits, the vocabulary has 33 tokens"):
        sample.mask(rand(2, 33), torch.tensor([1]), words)
    with pytest.raises(ValueError, match=r"words has shape \[1, 1\], expected \[R=2"):
        sample.mask(logits, torch.tensor([0, 1]), words)
    with pytest.raises(ValueError, match="mask: logits is bfloat16, expected float32"):
        sample.mask(logits.bfloat16(), torch.tensor([0]), words)
    with pytest.raises(ValueError, match="expected a vocabulary of 1 or more"):
        sample.sample(torch.zeros(2, 0), *filters(2), uniform)


def test_no_rows(isa):
    assert sample.sample(torch.zeros(0, 8), *filters(0), uniforms(0)).shape == (0,)
