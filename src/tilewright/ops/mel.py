"""Whisper's log-mel spectrogram of a sound; kernels in csrc/kernels/mel."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.native import kernels, view

SAMPLE_RATE = 16_000
WINDOW = 400  # samples: 25 ms
HOP = 160  # samples from one frame to the next: 10 ms
NUM_FREQUENCIES = WINDOW // 2 + 1
# Half a window is mirrored at each end.
MIN_SAMPLES = WINDOW // 2 + 1


@op
def log_mel(samples: Tensor, num_bins: int, *, out: Tensor | None = None) -> Tensor:
    """Frames fp32 [samples // HOP, num_bins] of mono samples fp32 [N] at 16 kHz, as Whisper's feature extractor gives.

    The power of each frequency under a Hann window around every HOP-th sample, summed by triangles on Slaney's mel
    scale; log10 of it, at least 1e-10 and at most 8 below the loudest of all frames, plus 4, over 4.
    """
    if out is None:
        out = torch.empty((len(samples) // HOP, num_bins))
    kernels.log_mel(view(samples), view(mel_filters(num_bins)), view(out))
    return out


@functools.cache
def mel_filters(num_bins: int) -> Tensor:
    """Weights fp32 [num_bins, NUM_FREQUENCIES]: a triangle for each bin between its neighbours, of equal areas."""
    frequencies = torch.linspace(0, SAMPLE_RATE / 2, NUM_FREQUENCIES, dtype=torch.float64)
    mels = torch.linspace(0, _mel_of(SAMPLE_RATE / 2), num_bins + 2, dtype=torch.float64)
    corners = torch.tensor([_hertz_of(mel) for mel in mels.tolist()], dtype=torch.float64)
    low, middle, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising = (frequencies - low) / (middle - low)
    falling = (high - frequencies) / (high - middle)
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
