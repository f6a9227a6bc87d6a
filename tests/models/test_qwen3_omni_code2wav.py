"""From codes to samples: against transformers, and in pieces, whose samples are those of the whole."""

import copy

import pytest
import tiny_speech
import torch
from components import on_ranks, rms

from tilewright.models.qwen3_omni.code2wav import MAX_FRAMES, Code2WavState, build
from tilewright.ops import backend


def filled(network, dtype=torch.float32, group=None):
    return tiny_speech.filled(lambda: build(network.config.to_dict()), network, "code2wav", dtype, group)


def codes_of(num_frames, seed=0):
    shape = (num_frames, tiny_speech.NUM_CODES)
    return torch.randint(0, tiny_speech.CODEBOOK, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def expected(network, codes_TQ):
    return network(codes_TQ.t()[None])[0, 0]


@torch.inference_mode()
def whole(ours, codes_TQ):
    return ours.decode([codes_TQ], [Code2WavState()])[0]


@torch.inference_mode()
def in_pieces(ours, codes_TQ, size):
    state = Code2WavState()
    samples = [ours.decode([piece], [state])[0] for piece in codes_TQ.split(size)]
    return torch.cat(samples), state


# The second config has kernels whose first output waits for several frames.
@pytest.mark.parametrize("changes", [(), (("upsampling_ratios", ()), ("upsample_rates", (3, 2)))], ids=["both", "late"])
@pytest.mark.parametrize("num_frames", [4, 20, MAX_FRAMES + 9])
def test_samples_are_those_of_transformers(changes, num_frames):
    network = tiny_speech.code2wav(**dict(changes))
    theirs = expected(network, codes_of(num_frames))
    ours = whole(filled(network), codes_of(num_frames))
    assert ours.shape == theirs.shape
    assert 0.05 < theirs.std() < 0.7 and (theirs.abs() < 1).float().mean() > 0.9
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("size", [1, 2, 3, 25, MAX_FRAMES + 1])
@pytest.mark.parametrize("changes", [(), (("upsampling_ratios", ()), ("upsample_rates", (3, 2)))], ids=["both", "late"])
def test_pieces_give_the_samples_of_the_whole(size, changes):
    ours, codes = filled(tiny_speech.code2wav(**dict(changes))), codes_of(MAX_FRAMES + 9)
    samples, _ = in_pieces(ours, codes, size)
    assert torch.equal(samples, whole(ours, codes))


def test_what_a_state_carries_does_not_grow():
    ours = filled(tiny_speech.code2wav())
    sizes = {in_pieces(ours, codes_of(num_frames), 3)[1].size_bytes for num_frames in (12, 30, 60)}
    assert len(sizes) == 1


def test_sequences_together_are_as_each_alone():
    ours = filled(tiny_speech.code2wav())
    codes = [codes_of(length, seed) for seed, length in enumerate((9, 9, 14, 5))]
    states = [Code2WavState() for _ in codes]
    with torch.inference_mode():
        # The last begins when the others are on their way.
        first = ours.decode([frames[:4] for frames in codes[:3]], states[:3])
        rest = ours.decode([*(frames[4:] for frames in codes[:3]), codes[3]], states)
    got = [torch.cat(parts) for parts in zip(first, rest[:3], strict=True)] + [rest[3]]
    for frames, samples in zip(codes, got, strict=True):
        assert torch.equal(samples, whole(ours, frames))


def test_no_frames_are_no_samples():
    ours, state = filled(tiny_speech.code2wav()), Code2WavState()
    (samples,) = ours.decode([codes_of(0)], [state])
    assert samples.shape == (0,) and state.num_frames == 0


def test_bf16_errs_as_little_as_theirs():
    network, codes = tiny_speech.code2wav(), codes_of(25)
    truth = expected(network, codes)
    theirs = expected(copy.deepcopy(network).to(torch.bfloat16), codes).float()
    ours = whole(filled(network, torch.bfloat16), codes)
    assert 0 < rms(ours - truth) <= 1.25 * rms(theirs - truth)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_samples_of_one(size):
    network, codes = tiny_speech.code2wav(), codes_of(20)
    for samples in on_ranks(size, lambda group: filled(network, group=group), lambda ours: whole(ours, codes)):
        assert (samples - whole(filled(network), codes)).abs().max() < 1e-5


def test_torch_backend_agrees():
    network, codes = tiny_speech.code2wav(), codes_of(20)
    with backend.use("torch"):
        samples = whole(filled(network), codes)
    assert (samples - whole(filled(network), codes)).abs().max() < 1e-5
