"""Decoding latents beside diffusers, in turns: python benchmarks/vae.py [--dtype float32] [--size 512] [--profile]

Flux's and Z-Image's autoencoder with random weights; diffusers as it is, and in torch's channels_last form. A round is
one decode of each; of its ratios the median is told, and the least and greatest. `--profile` tells where our time goes.
The machine is probed before and after.
"""

from __future__ import annotations

import argparse
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from turns import timed_in_turns

from tilewright.layers.conv import Conv2d, UpsampleConv2d
from tilewright.layers.norm import GroupNorm
from tilewright.models.autoencoder_kl import AutoencoderKL as Ours
from tilewright.models.autoencoder_kl import KlAttentionBlock, build
from tilewright.weights.spec import iter_weights

CONFIG = {
    "latent_channels": 16,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 1.0,
}
MAX_DIFFERENCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}  # of the largest output


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode latents beside diffusers, in turns.")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--size", type=int, default=512, help="rows and columns of the image")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="where our time goes, without diffusers")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    theirs, ours = networks(CONFIG, dtype)
    z = torch.randn(1, 16, args.size // 8, args.size // 8).to(dtype)
    latents = z.movedim(1, -1).unsqueeze(1).contiguous()
    with torch.inference_mode():
        if args.profile:
            profile(ours, latents)
        else:
            compare(theirs, ours, z, latents, args.rounds)


def networks(config: Mapping[str, Any], dtype: torch.dtype) -> tuple[Any, Ours]:
    """diffusers' and ours, with the same random weights."""
    from diffusers import AutoencoderKL

    theirs = AutoencoderKL.from_config(config).to(dtype).eval()
    tensors = theirs.state_dict()
    ours = build(config)
    for weight in iter_weights(ours):
        weight.build([tensors[source.name] for source in weight.sources], dtype)
    return theirs, ours


def compare(theirs: Any, ours: Ours, z: torch.Tensor, latents: torch.Tensor, rounds: int) -> None:
    expected = theirs.decode(z).sample.movedim(1, -1).float()
    difference = ((ours.decode(latents)[:, 0].float() - expected).abs().max() / expected.abs().max()).item()
    assert difference < MAX_DIFFERENCE[z.dtype], f"off by {difference:.2g} of the largest output"
    calls = {**calls_of(theirs, z), "ours": lambda: ours.decode(latents)}
    turns = timed_in_turns(calls, rounds)
    limits = turns.limits
    print(f"{z.dtype}: read {limits.read_gb_s:.1f} GB/s, bf16 peak {limits.peak_tflops:.2f} TFLOP/s")
    with timed(Conv2d, UpsampleConv2d) as spent:
        ours.decode(latents)
    num_operations = sum(own for _, own in spent.values())
    for name in calls:
        speed = turns.speed(name, num_operations)
        print(f"  {name}: {turns.median_s(name):.3f} s, {turns.beside_ours(name)}; convolutions: {speed}")


def calls_of(theirs: Any, z: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """diffusers' decode as it is, and of a copy in torch's channels_last form."""
    channels_last = copy.deepcopy(theirs).to(memory_format=torch.channels_last)
    pixels_last = z.to(memory_format=torch.channels_last)
    return {
        "diffusers": lambda: theirs.decode(z).sample,
        "diffusers, channels_last": lambda: channels_last.decode(pixels_last).sample,
    }


def profile(ours: Ours, latents: torch.Tensor) -> None:
    ours.decode(latents)
    with timed(Conv2d, UpsampleConv2d, GroupNorm, KlAttentionBlock) as spent:
        begin_s = perf_counter()
        ours.decode(latents)
        whole_s = perf_counter() - begin_s
    print(f"{latents.dtype}: {whole_s:.3f} s")
    for name, (seconds, operations) in sorted(spent.items(), key=lambda item: -item[1][0]):
        speed = f", {operations / seconds / 1e9:.0f} GFLOP/s" if operations else ""
        print(f"  {seconds:.3f} s  {name}{speed}")


@contextmanager
def timed(*layers: type) -> Iterator[dict[str, list[float]]]:
    """Seconds and operations of every layer of these classes, by class and shape."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    calls = {layer: layer.__call__ for layer in layers}

    def instrument(layer: type) -> None:
        def call(self: object, x: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
            begin_s = perf_counter()
            result = calls[layer](self, x, *args, **options)
            name = f"{layer.__name__} {list(x.shape)} -> {list(result.shape)}"
            entry = spent[name]
            entry[0] += perf_counter() - begin_s
            if isinstance(self, Conv2d | UpsampleConv2d):
                taps = 4 if isinstance(self, UpsampleConv2d) else self.weight.sources[0].shape[2] ** 2
                entry[1] += 2 * result.numel() * self.in_channels * taps
            return result

        layer.__call__ = call  # type: ignore[assignment]

    for layer in layers:
        instrument(layer)
    try:
        yield spent
    finally:
        for layer, call in calls.items():
            layer.__call__ = call  # type: ignore[assignment]


if __name__ == "__main__":
    main()
