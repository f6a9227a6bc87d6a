"""Steps of a diffusion transformer beside diffusers, in turns: python benchmarks/denoise.py [CONFIG.json] [--alone]

Without a config: a Z-Image of 329M. With one (Z-Image's or Wan's transformer/config.json), that shape. Weights are
random. A round is one step of each; of its ratios the median is told, and the least and greatest. `--alone` leaves
diffusers out, for shapes whose weights would not fit twice, in bf16. Beside the
seconds stands the share of the multiply peak, which is probed before and after.

  python benchmarks/denoise.py
  python benchmarks/denoise.py Z-Image-Turbo/transformer.json --size 1024 --alone
  python benchmarks/denoise.py Wan2.1-T2V-1.3B/transformer.json --size 832x480 --frames 6
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from shapes import fill, random_value
from torch import Tensor
from turns import timed_in_turns

from tilewright.models import wan, z_image
from tilewright.weights.spec import iter_weights

SMALL = {
    "_class_name": "ZImageTransformer2DModel",
    "all_f_patch_size": [1],
    "all_patch_size": [2],
    "axes_dims": [32, 48, 48],
    "axes_lens": [1024, 512, 512],
    "cap_feat_dim": 2560,
    "dim": 1024,
    "in_channels": 16,
    "n_heads": 8,
    "n_kv_heads": 8,
    "n_layers": 20,
    "n_refiner_layers": 2,
    "norm_eps": 1e-5,
    "qk_norm": True,
    "rope_theta": 256.0,
    "t_scale": 1000.0,
}
# Parts of the names of weights that are not multiplied with every row of a step.
ASIDE = ("adaLN", "t_embedder", "cap_embedder", "context_refiner", "condition_embedder", "attn2.to_k", "attn2.to_v")
MAX_DIFFERENCE = {torch.bfloat16: 0.1, torch.float32: 1e-3}  # of the largest output


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of a diffusion transformer beside diffusers, in turns.")
    parser.add_argument("config", nargs="?", type=Path, help="a transformer's config.json (default: a Z-Image of 329M)")
    parser.add_argument("--size", type=size, default=(512, 512), help="512 or 832x480 (default: 512)")
    parser.add_argument("--frames", type=int, default=1, help="of the latents, for videos (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of the caption (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="ours only")
    args = parser.parse_args()
    config = json.loads(args.config.read_text()) if args.config else SMALL
    bench = {"ZImageTransformer2DModel": ZImage, "WanTransformer3DModel": Wan}[config["_class_name"]]
    torch.manual_seed(0)
    with torch.inference_mode():
        run(bench(config, args.size, args.frames, args.tokens, getattr(torch, args.dtype)), args)


def size(text: str) -> tuple[int, int]:
    """(width, height) of "832x480", or of the "512" of a square."""
    width, _, height = text.partition("x")
    return int(width), int(height or width)


class ZImage:
    """One step of Z-Image, ours and diffusers'."""

    def __init__(
        self, config: Mapping[str, Any], size: tuple[int, int], frames: int, num_tokens: int, dtype: torch.dtype
    ) -> None:
        self.config, self.dtype = config, dtype
        width, height = (side // 8 for side in size)
        self.latents = torch.randn(1, config["in_channels"], height, width)
        self.caption = torch.randn(num_tokens, config["cap_feat_dim"]).to(dtype)
        self.num_rows = height * width // 4 + num_tokens
        self.num_pairs = self.num_rows**2  # that attend, in a layer
        self.attention_width, self.num_layers = config["dim"], config["n_layers"] + config["n_refiner_layers"]

    def theirs(self) -> torch.nn.Module:
        from diffusers import ZImageTransformer2DModel

        return random_network(lambda: ZImageTransformer2DModel.from_config(self.config), self.dtype)

    def their_step(self, network: Any) -> Tensor:
        return network([self.latents.to(self.dtype)[0, :, None]], torch.tensor([0.5]), [self.caption])[0][0][:, 0]

    def ours(self) -> z_image.ZImageTransformer:
        return z_image.build(self.config)

    def our_step(self, network: z_image.ZImageTransformer) -> Callable[[], Tensor]:
        latents = self.latents.movedim(1, -1)[:, None].to(self.dtype).contiguous()
        prepared = network.prepare([self.caption], [0], *self.latents.shape[2:])
        return lambda: network(latents, 0.5, prepared)[0, 0].movedim(-1, 0)


class Wan:
    """One step of Wan, ours and diffusers'. The text's keys and values are made once for all steps: not counted."""

    def __init__(
        self, config: Mapping[str, Any], size: tuple[int, int], frames: int, num_tokens: int, dtype: torch.dtype
    ) -> None:
        self.config, self.dtype = config, dtype
        width, height = (side // 8 for side in size)
        self.latents = torch.randn(1, config["in_channels"], frames, height, width)
        self.text = torch.randn(512, config["text_dim"]).to(dtype)
        self.num_rows = frames * height * width // 4
        self.num_pairs = self.num_rows * (self.num_rows + len(self.text))
        self.attention_width = config["num_attention_heads"] * config["attention_head_dim"]
        self.num_layers = config["num_layers"]

    def theirs(self) -> torch.nn.Module:
        from diffusers import WanTransformer3DModel

        return random_network(lambda: WanTransformer3DModel.from_config(self.config), self.dtype)

    def their_step(self, network: Any) -> Tensor:
        return network(self.latents.to(self.dtype), torch.tensor([500.0]), self.text[None], return_dict=False)[0][0]

    def ours(self) -> wan.WanTransformer:
        return wan.build(self.config)

    def our_step(self, network: wan.WanTransformer) -> Callable[[], Tensor]:
        latents = self.latents.movedim(1, -1).contiguous()
        text = network.embed_text([self.text])
        return lambda: network(latents, torch.tensor([500.0]), text)[0].movedim(-1, 0)


@contextlib.contextmanager
def uninitialised(dtype: torch.dtype) -> Iterator[None]:
    """Parameters that are made within are of the type and hold anything: torch's own first values take minutes."""
    names = [name for name in vars(torch.nn.init) if name.endswith("_") and not name.startswith("_")]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with mock.patch.multiple(torch.nn.init, **dict.fromkeys(names, lambda tensor, *_, **__: tensor)):
            yield
    finally:
        torch.set_default_dtype(before)


def random_network(make: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
    """diffusers' network with small random weights, and norms that are about one, in seconds whatever its size."""
    with uninitialised(dtype):
        network = make().to(dtype).eval()
    block = (torch.randn(1 << 22) * 0.01).to(dtype)
    for name, parameter in network.named_parameters():
        fill(parameter.data, block)
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter.data += 1
    return network


def take_weights(ours: object, theirs: torch.nn.Module, dtype: torch.dtype) -> None:
    """The same weights in both, packed in ours."""
    tensors = theirs.state_dict()
    for weight in iter_weights(ours):
        weight.build([tensors[source.name] for source in weight.sources], dtype)


def make_weights(ours: object) -> None:
    """Random ones in ours alone, in bf16."""
    block = (torch.randn(1 << 20) * 0.02).to(torch.bfloat16)
    for weight in iter_weights(ours):
        weight.restore(random_value(weight, block))


def check_same(expected: Tensor, found: Tensor) -> None:
    difference = ((found.float() - expected.float()).abs().max() / expected.float().abs().max()).item()
    assert difference < MAX_DIFFERENCE[expected.dtype], f"off by {difference:.2g} of the largest output"


def run(bench: ZImage | Wan, args: argparse.Namespace) -> None:
    ours = bench.ours()
    calls: dict[str, Callable[[], Tensor]] = {}
    if args.alone:
        make_weights(ours)
    else:
        theirs = bench.theirs()
        take_weights(ours, theirs, bench.dtype)
        calls["diffusers"] = lambda: bench.their_step(theirs)
    calls["ours"] = bench.our_step(ours)
    if not args.alone:
        check_same(*(call().to(bench.dtype) for call in calls.values()))
    turns = timed_in_turns(calls, args.rounds)
    limits = turns.limits
    print(
        f"{bench.dtype}, {bench.num_rows} rows: read {limits.read_gb_s:.0f} GB/s, torch's product "
        f"{limits.gemm_tflops:.2f} and bf16 peak {limits.peak_tflops:.2f} TFLOP/s"
    )
    for name in calls:
        speed = turns.speed(name, operations(bench, ours))
        print(f"  {name}: {turns.median_s(name):.3f} s a step, {turns.beside_ours(name)}; {speed}")


def operations(bench: ZImage | Wan, network: object) -> float:
    """Of one step: a multiplication and an addition for each row and weight, and attention over all pairs of rows.

    Weights that see a timestep or a text alone are a few rows' work, or are not in the step at all: left out.
    """
    sources = [source for weight in iter_weights(network) for source in weight.sources]
    num_weights = sum(math.prod(source.shape) for source in sources if not any(part in source.name for part in ASIDE))
    return 2.0 * bench.num_rows * num_weights + 4.0 * bench.num_pairs * bench.attention_width * bench.num_layers


if __name__ == "__main__":
    main()
