"""Log-mel spectrograms, as the kernels compute them."""

import torch
from torch import Tensor

from tilewright.ops.mel import HOP, MIN_SAMPLES, WINDOW, mel_filters
from tilewright.ops.torch_backend.common import into


def log_mel(samples: Tensor, num_bins: int, *, out: Tensor | None = None) -> Tensor:
    if len(samples) < MIN_SAMPLES:
        raise ValueError(f"log_mel: there are {len(samples)} samples, expected {MIN_SAMPLES} or more")
    half = WINDOW // 2
    mirrored = torch.nn.functional.pad(samples[None, None], (half, half), mode="reflect")[0, 0]
    frames = mirrored.unfold(0, WINDOW, HOP)[: len(samples) // HOP]
    spectrum = torch.fft.rfft(frames * torch.hann_window(WINDOW, device=samples.device))
    power = spectrum.real.square() + spectrum.imag.square()
    logs = (power @ mel_filters(num_bins).to(samples.device).T).clamp(min=1e-10).log10()
    return into(out, (torch.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0)
