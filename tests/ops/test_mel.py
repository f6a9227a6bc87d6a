"""Log-mel frames are those of transformers' feature extractor, at every level."""

import numpy as np
import pytest
import torch
from oracle import require

from tilewright.ops import backend
from tilewright.ops.media import HOP, MIN_SAMPLES, log_mel, mel_filters


@pytest.fixture(scope="module")
def extractor():
    return require("transformers").WhisperFeatureExtractor(feature_size=128)


def speech_like(num_samples, seed=0):
    """Noise of changing loudness over a few tones."""
    rng = np.random.default_rng(seed)
    time = np.arange(num_samples) / 16_000
    tones = sum(np.sin(2 * np.pi * hertz * time) for hertz in (140, 720, 2_900)) / 6
    noise = rng.standard_normal(num_samples) * 0.05
    return ((tones + noise) * (0.4 + 0.3 * np.sin(5 * time))).astype(np.float32)


def expected(extractor, samples):
    found = extractor(samples, sampling_rate=16_000, padding=True, truncation=False, return_tensors="pt")
    return found["input_features"][0].T


@pytest.mark.parametrize("num_samples", [MIN_SAMPLES, 399, 400, 15_999, 16_000, 16_001, 52_345])
def test_frames_are_those_of_transformers(extractor, isa, num_samples):
    samples = speech_like(num_samples)
    ours = log_mel(torch.from_numpy(samples), 128)
    assert ours.shape == (num_samples // HOP, 128)
    torch.testing.assert_close(ours, expected(extractor, samples), atol=1e-4, rtol=0)


def test_filters_are_those_of_transformers(extractor):
    torch.testing.assert_close(mel_filters(128).double(), torch.from_numpy(extractor.mel_filters).T, atol=1e-8, rtol=0)


def test_both_backends_agree_and_write_to_rows_of_others(isa):
    samples = torch.from_numpy(speech_like(7_777))
    memory = torch.full((48, 40), torch.nan)
    log_mel(samples, 33, out=memory[:, :33])
    assert memory[:, 33:].isnan().all()
    with backend.use("torch"):
        torch.testing.assert_close(memory[:, :33], log_mel(samples, 33), atol=1e-4, rtol=0)


def test_silence_is_one_value(isa):
    assert torch.equal(log_mel(torch.zeros(1_600), 128), torch.full((10, 128), -1.5))


def test_a_part_does_not_depend_on_threads(isa):
    """The loudest frame bounds all others, wherever it is."""
    samples = torch.zeros(32_000)
    samples[31_000:] = torch.from_numpy(speech_like(1_000))
    frames = log_mel(samples, 80)
    assert frames[:150].max() == frames.min() == frames[-8:].max() - 2.0


@pytest.mark.parametrize("num_samples, num_frames, says", [(200, 1, "201 or more"), (800, 4, "out has 4 frames")])
def test_what_is_refused(num_samples, num_frames, says):
    with pytest.raises(ValueError, match=says):
        log_mel(torch.zeros(num_samples), 16, out=torch.empty(num_frames, 16))
