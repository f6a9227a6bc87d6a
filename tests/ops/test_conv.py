import pytest
import torch
from helpers import assert_close, poisoned, rand

from tilewright.ops import backend, conv

# A decode batch; lengths below, at and above the width; more than one piece of 32 tokens.
LENGTHS = [[1, 1, 1], [2, 0, 5], [3, 4, 7, 31], [100, 2]]


class Case:
    def __init__(self, lengths, channels, width, dtype, *, state_dtype=torch.float32, weight_dtype=torch.float32):
        self.x = rand(sum(lengths), channels, dtype=dtype)
        self.weight = rand(width, channels, dtype=weight_dtype, seed=1)
        self.states = rand(2 * len(lengths) + 1, width - 1, channels, dtype=state_dtype, seed=2)
        self.starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        self.read_slots = torch.arange(2 * len(lengths), 0, -2, dtype=torch.int32)
        if len(lengths) > 1:
            self.read_slots[-1] = -1  # begins with nothing

    def check(self, write_slots=None, bias=None):
        arguments = self.starts, self.read_slots, write_slots
        found = []
        for name in backend.NAMES:
            states, out = self.states.clone(), poisoned(*self.x.shape, dtype=self.x.dtype)
            with backend.use(name):
                assert conv.causal_conv(self.x, self.weight, states, *arguments, bias=bias, out=out) is out
            found.append((out, states))
        (ours, our_states), (theirs, their_states) = found
        assert_close(ours, theirs)
        assert torch.equal(our_states, their_states)


@pytest.mark.parametrize("channels,width", [(1, 3), (64, 1), (97, 4), (97, 33)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_backends_agree(isa, dtype, lengths, channels, width):
    Case(lengths, channels, width, dtype).check()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_types_and_bias(isa, dtype, state_dtype, weight_dtype):
    case = Case([1, 40, 2], 50, 4, dtype, state_dtype=state_dtype, weight_dtype=weight_dtype)
    case.check(bias=rand(50, dtype=weight_dtype, seed=3))


@pytest.mark.parametrize("width", [1, 4, 33])
@pytest.mark.parametrize("lengths", [[4, 2, 3], [40, 2, 70]], ids=str)
def test_keeps_the_state_after_each_token_that_has_a_slot(isa, dtype, lengths, width):
    case = Case(lengths, 33, width, dtype)
    num_tokens = sum(lengths)
    case.states = rand(num_tokens + 7, width - 1, 33, seed=5)
    write_slots = torch.arange(7, 7 + num_tokens, dtype=torch.int32)
    write_slots[1::3] = -1
    write_slots[0] = case.read_slots[0]  # over the state that the tokens after it still need
    case.check(write_slots)


def test_many_channels_are_cut_into_pieces(isa, dtype):
    Case([1, 35], 4099, 4, dtype).check()


def test_slices_of_a_packed_row_and_of_a_larger_pool(isa):
    case = Case([9, 1], 40, 4, torch.float32)
    packed, layers = rand(10, 60), torch.full((5, 3, 3, 40), float("nan"))
    packed[:, 7:47] = case.x
    layers[:, 1] = case.states
    out = conv.causal_conv(packed[:, 7:47], case.weight, layers[:, 1], case.starts, case.read_slots)
    states = case.states.clone()
    assert torch.equal(out, conv.causal_conv(case.x, case.weight, states, case.starts, case.read_slots))
    assert torch.equal(layers[:, 1], states)


@pytest.mark.parametrize("width", [1, 4, 33])
def test_a_prompt_in_pieces_is_the_prompt(isa, dtype, width):
    case = Case([50], 64, width, dtype)
    whole = conv.causal_conv(case.x, case.weight, case.states.clone(), case.starts, case.read_slots)
    states, pieces = case.states.clone(), []
    for piece in case.x.split([1, 2, 20, 3, 24]):
        starts = torch.tensor([0, len(piece)], dtype=torch.int32)
        pieces.append(conv.causal_conv(piece.contiguous(), case.weight, states, starts, case.read_slots))
    assert torch.equal(torch.cat(pieces), whole)


def test_errors_name_the_tensor():
    case = Case([3], 8, 4, torch.float32)
    with pytest.raises(ValueError, match=r"states has shape \[3, 4, 8\], expected \[_, W-1=3, C=8\]"):
        conv.causal_conv(case.x, case.weight, torch.zeros(3, 4, 8), case.starts, case.read_slots)
    with pytest.raises(ValueError, match="weight has 0 taps, expected 1 or more"):
        conv.causal_conv(case.x, torch.zeros(0, 8), torch.zeros(3, 0, 8), case.starts, case.read_slots)
    with pytest.raises(ValueError, match="out is x, expected other memory"):
        conv.causal_conv(case.x, case.weight, case.states, case.starts, case.read_slots, out=case.x)
    with pytest.raises(ValueError, match=r"read_slots\[0\] is 3, the pool has 3 slots"):
        conv.causal_conv(case.x, case.weight, case.states, case.starts, torch.tensor([3], dtype=torch.int32))
