"""What a microphone adds to a voice: a room, noise, a level. On batches, on any device, all from one generator."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

SAMPLE_RATE = 16_000
ECHO = 4096  # samples: a quarter of a second
DRY, SILENT = 0.45, 0.2  # shares of rows without a room, and without noise
SNR_DB = (6.0, 40.0)
REVERBERATION_S = (0.05, 0.35)  # until an echo is 60 dB below the voice
ECHO_DB = (-18.0, -6.0)  # of all echoes together, against the voice itself
PEAK_DB = (-26.0, -1.0)
# What is missing of mel frames at most, in time (a frame is 10 ms) and in frequency, and how often.
GAP_FRAMES, GAP_BINS, NUM_GAPS = 8, 14, 2
# How a speaker differs from another in mel frames: the frequencies of the lowest and the highest resonances, with those
# between them in between, in what share of rows, and a curve over the bins of so many waves, each of about such height
# (0.25 is 10 dB).
STRETCH, STRETCHED, NUM_WAVES, WAVE_HEIGHT = 0.14, 0.8, 4, 0.04


def worn(samples_BN: Tensor, generator: torch.Generator) -> Tensor:
    """The sounds as heard in a room: with echoes, noise of some colour, at some level."""
    x = _with_echoes(samples_BN, generator)
    x = _with_noise(x, generator)
    peak = x.abs().amax(1, keepdim=True).clamp(min=1e-5)
    return x / peak * _decibels(_between(x, PEAK_DB, generator))


def as_of_others(mel_BTF: Tensor, generator: torch.Generator) -> Tensor:
    """Mel frames as if somebody else had spoken: a throat of another shape, and a voice of another colour."""
    rows, _, num_bins = mel_BTF.shape
    device = mel_BTF.device
    centres = _centres(num_bins).to(device)
    place = torch.arange(num_bins, device=device) / num_bins
    lowest, highest = (2 * _uniform(mel_BTF, generator) - 1 for _ in range(2))
    by = 1 + STRETCH * torch.lerp(lowest, highest, place) * (_uniform(mel_BTF, generator) < STRETCHED)
    wanted = (centres * by).clamp(centres[0], centres[-1])
    after = torch.searchsorted(centres, wanted).clamp(1, num_bins - 1)
    share = (wanted - centres[after - 1]) / (centres[after] - centres[after - 1])
    low, high = (mel_BTF.gather(2, at[:, None].expand_as(mel_BTF)) for at in (after - 1, after))
    waves = torch.cos(torch.pi * torch.arange(1, NUM_WAVES + 1, device=device)[:, None] * place)
    heights = WAVE_HEIGHT * torch.randn(rows, NUM_WAVES, generator=generator, device=device)
    return torch.lerp(low, high, share[:, None]) + (heights @ waves)[:, None]


@cache
def _centres(num_bins: int) -> Tensor:
    """The frequencies of the bins, on the scale of `tilewright.ops.media`: even up to 1 kHz, then in even ratios."""
    most = 15 + 27 * math.log(SAMPLE_RATE / 2 / 1000, 6.4)
    mels = torch.linspace(0, most, num_bins + 2)[1:-1]
    return torch.where(mels < 15, mels * 1000 / 15, 1000 * 6.4 ** ((mels - 15) / 27))


def with_gaps(mel_BTF: Tensor, generator: torch.Generator) -> Tensor:
    """Mel frames of which short stretches of time and bands of frequency are missing: each row has others.

    A network that has heard its speakers thousands of times knows them by little; it must not come to rely on that.
    """
    rows, num_frames, num_bins = mel_BTF.shape
    device = mel_BTF.device
    is_missing = torch.zeros(rows, num_frames, num_bins, dtype=torch.bool, device=device)
    for size, longest, axis in ((num_frames, GAP_FRAMES, 1), (num_bins, GAP_BINS, 2)):
        place = torch.arange(size, device=device)
        for _ in range(NUM_GAPS):
            length = (torch.rand(rows, 1, generator=generator, device=device) * (longest + 1)).floor()
            start = torch.rand(rows, 1, generator=generator, device=device) * (size - length)
            is_missing |= ((place >= start) & (place < start + length)).unsqueeze(3 - axis)
    return torch.where(is_missing, mel_BTF.mean((1, 2), keepdim=True), mel_BTF)


def _with_echoes(x: Tensor, generator: torch.Generator) -> Tensor:
    rows, length = x.shape
    time_s = torch.arange(1, ECHO + 1, device=x.device) / SAMPLE_RATE
    decay = torch.exp(-6.9 * time_s / _between(x, REVERBERATION_S, generator))
    echoes = torch.randn(rows, ECHO, generator=generator, device=x.device) * decay
    loudness = _decibels(_between(x, ECHO_DB, generator)) * (_uniform(x, generator) > DRY)
    echoes = echoes / echoes.norm(dim=1, keepdim=True) * loudness
    whole = _padded(length + ECHO)
    heard = torch.fft.irfft(torch.fft.rfft(x, whole) * torch.fft.rfft(echoes, whole), whole)
    return x + heard[:, :length]


def _with_noise(x: Tensor, generator: torch.Generator) -> Tensor:
    """Noise whose power falls with frequency: from white to brown."""
    length = x.shape[1]
    white = torch.fft.rfft(torch.randn(len(x), _padded(length), generator=generator, device=x.device))
    frequency = torch.arange(1, white.shape[1] + 1, device=x.device) / white.shape[1]
    noise = torch.fft.irfft(white * frequency ** -(_uniform(x, generator)))[:, :length]
    noise = noise / noise.square().mean(1, keepdim=True).sqrt()
    power = x.square().mean(1, keepdim=True).sqrt()
    strength = _decibels(-_between(x, SNR_DB, generator)) * (_uniform(x, generator) > SILENT)
    return x + noise * power * strength


def _padded(length: int) -> int:
    """A few lengths alone: a GPU keeps a plan for each, and is slow for those with large factors."""
    return -(-length // 8192) * 8192


def _uniform(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(len(x), 1, generator=generator, device=x.device)


def _between(x: Tensor, bounds: tuple[float, float], generator: torch.Generator) -> Tensor:
    return bounds[0] + (bounds[1] - bounds[0]) * _uniform(x, generator)


def _decibels(value: Tensor) -> Tensor:
    return 10.0 ** (value / 20)
