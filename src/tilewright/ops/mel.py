"""Whisper's log-mel spectrogram of a sound; kernels in csrc/kernels/mel."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

SAMPLE_RATE = 16_000
WINDOW = 400  # samples: 25 ms
HOP = 160  # samples from one frame to the next: 10 ms
NUM_FREQUENCIES = WINDOW // 2 + 1
# Half a window is mirrored at each end.
MIN_SAMPLES = WINDOW // 2 + 1


def log_mel(samples: Tensor, num_bins: int, *, out: Tensor | None = None) -> Tensor:
    """Frames [samples // HOP, num_bins] fp32 of mono samples fp32 at 16 kHz.

    The power of each frequency under a Hann window around every HOP-th sample, summed by triangles on Slaney's mel
    scale; log10 of it, at least 1e-10 and at most 8 below the loudest of all frames, plus 4, over 4.
    """
    padded = torch.nn.functional.pad(samples[None, None], (WINDOW // 2, WINDOW // 2), mode="reflect")[0, 0]
    frames = padded.unfold(0, WINDOW, HOP)[: len(samples) // HOP]
    spectrum = torch.fft.rfft(frames * torch.hann_window(WINDOW))
    power = spectrum.real.square() + spectrum.imag.square()
    log = (power @ mel_filters(num_bins)).clamp(min=1e-10).log10()
    result = (torch.maximum(log, log.max() - 8.0) + 4.0) / 4.0
    return result if out is None else out.copy_(result)


@functools.cache
def mel_filters(num_bins: int) -> Tensor:
    """Weights fp32 [NUM_FREQUENCIES, num_bins]: a triangle for each bin between its neighbours, of equal areas."""
    frequencies = torch.linspace(0, SAMPLE_RATE / 2, NUM_FREQUENCIES, dtype=torch.float64)
    mels = torch.linspace(0, _mel_of(SAMPLE_RATE / 2), num_bins + 2, dtype=torch.float64)
    corners = torch.tensor([_hertz_of(mel) for mel in mels.tolist()], dtype=torch.float64)
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    rising = (frequencies[:, None] - low) / (middle - low)
    falling = (high - frequencies[:, None]) / (high - middle)
    return (torch.minimum(rising, falling).clamp(min=0) * (2.0 / (high - low))).float()


# Slaney's scale: linear up to 1 kHz, 15 mel; then 27 mel for a factor of 6.4.
_LINEAR_HERTZ, _LINEAR_MELS = 1000.0, 15.0
_MELS_PER_LOG = 27.0 / math.log(6.4)


def _mel_of(hertz: float) -> float:
    if hertz < _LINEAR_HERTZ:
        return hertz * _LINEAR_MELS / _LINEAR_HERTZ
    return _LINEAR_MELS + math.log(hertz / _LINEAR_HERTZ) * _MELS_PER_LOG


def _hertz_of(mel: float) -> float:
    if mel < _LINEAR_MELS:
        return mel * _LINEAR_HERTZ / _LINEAR_MELS
    return _LINEAR_HERTZ * math.exp((mel - _LINEAR_MELS) / _MELS_PER_LOG)
