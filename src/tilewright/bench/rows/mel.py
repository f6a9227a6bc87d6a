"""Sounds to log-mel frames."""

from collections.abc import Iterator
from functools import partial

import torch

from tilewright.bench.row import Calls, Row
from tilewright.ops.mel import HOP, NUM_FREQUENCIES, SAMPLE_RATE, WINDOW, log_mel
from tilewright.ops.torch_backend import mel as reference

SECONDS = (8, 60)
NUM_BINS = 128


def rows() -> Iterator[Row]:
    for seconds in SECONDS:
        num_samples = seconds * SAMPLE_RATE
        num_frames = num_samples // HOP
        # A transform of n points takes 2.5 n log2 n, a frequency is in two triangles.
        flops = num_frames * (int(2.5 * WINDOW * 8.6) + 7 * NUM_FREQUENCIES)
        bytes_moved = 4 * (num_samples + num_frames * NUM_BINS)
        yield Row("log_mel", f"{seconds} s, {NUM_BINS} bins", bytes_moved, flops, partial(_log_mel, num_samples))


def _log_mel(num_samples: int) -> Calls:
    samples = torch.randn(num_samples, generator=torch.Generator().manual_seed(0)) * 0.1
    out = log_mel(samples, NUM_BINS)
    return Calls(
        lambda _: log_mel(samples, NUM_BINS, out=out),
        lambda _: reference.log_mel(samples, NUM_BINS),
        lambda: torch.allclose(log_mel(samples, NUM_BINS), reference.log_mel(samples, NUM_BINS), atol=1e-4),
    )
