"""Z-Image-Turbo and Wan 2.1 1.3B at their real sizes, with random weights, beside diffusers in bf16.

  python benchmarks/diffusion_shapes.py CONFIGS [--seconds 150] [--only z-image vae wan] [--alone]

CONFIGS is a folder with Z-Image-Turbo/transformer.json, Z-Image-Turbo/vae.json and Wan2.1-T2V-1.3B/transformer.json. No
checkpoint is needed, nothing is downloaded, and beside torch and this package only diffusers, which `--alone` leaves
out. Random weights of whole depth are made in memory in seconds. Outputs are compared first, with the same weights in
both, at a small size and of a network that is as wide and has one layer of each kind.

  z-image  a step of 1024 x 1024 pixels: 4,096 rows and 64 of the caption, 30 layers (25 GB of weights in all)
  vae      its autoencoder decodes 1024 x 1024 pixels; diffusers as it is and in channels_last form
  wan      a step of 832 x 480 pixels: 21 frames in turns with diffusers, then all 81; a guided step is two of those

Each round is a run of both, one after the other, and is printed when it is over: seconds, how many times as long
diffusers took, and the share of the multiply peak, which is probed before and after each section. The sections share
the seconds, start-up included; what would not fit any more is left out with a line that says so.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

BEGIN_S = perf_counter()  # before torch is imported

import torch  # noqa: E402
import vae  # noqa: E402
from denoise import Wan, ZImage, check_same, make_weights, operations, take_weights  # noqa: E402
from turns import timed_in_turns  # noqa: E402

from tilewright.layers.conv import Conv2d, UpsampleConv2d  # noqa: E402
from tilewright.ops.native import kernels  # noqa: E402

# Of all seconds, the part after which a section begins no round; at least one round is run if it may end in time.
ENDS = {"z-image": 0.5, "vae": 0.6, "wan": 1.0}
MAX_ROUNDS = 3
SMALL = (256, 256)  # where outputs are compared
DEPTHS = {"n_layers", "n_refiner_layers", "num_layers"}
DTYPE = torch.bfloat16
Calls = dict[str, Callable[[], object]]


def say(text: str) -> None:
    print(f"[{perf_counter() - BEGIN_S:5.1f} s] {text}", flush=True)


def turns(name: str, calls: Calls, num_operations: float, until_s: float) -> dict[str, float]:
    """The median seconds of each, over as many rounds as may end in time; each is printed."""

    def rounds() -> Iterator[int]:
        round_s = 0.0
        for number in range(MAX_ROUNDS):
            if number and perf_counter() - BEGIN_S + round_s > until_s:
                return
            began_s = perf_counter()
            yield number
            round_s = perf_counter() - began_s
            say(f"{name}: round {number + 1} took {round_s:.2f} s")

    found = timed_in_turns(calls, rounds())
    limits = found.limits
    for call, times_s in found.times_s.items():
        say(
            f"{name}: {call} {found.median_s(call):.2f} s, {found.beside_ours(call)}; "
            f"{found.speed(call, num_operations)}, which is {limits.peak_tflops:.2f} "
            f"(torch's product: {limits.gemm_tflops:.2f}); {num_operations / 1e12:.1f} TFLOP, median of {len(times_s)}"
        )
    return {call: found.median_s(call) for call in calls}


class Transformer:
    """A network at whole depth, ours and theirs."""

    def __init__(self, kind: type[ZImage] | type[Wan], config: dict[str, Any], alone: bool) -> None:
        self.kind, self.config = kind, config
        if not alone:
            compare(kind({**config, **dict.fromkeys(config.keys() & DEPTHS, 1)}, SMALL, 1, 64, DTYPE))
        begin_s = perf_counter()
        bench = self.at(SMALL)
        self.ours: Any = bench.ours()
        make_weights(self.ours)
        self.theirs = None if alone else bench.theirs()
        say(f"{config['_class_name']}: random weights were made in {perf_counter() - begin_s:.1f} s")

    def at(self, size: tuple[int, int], frames: int = 1) -> ZImage | Wan:
        return self.kind(self.config, size, frames, 64, DTYPE)

    def calls(self, bench: ZImage | Wan) -> Calls:
        ours: Calls = {"ours": bench.our_step(self.ours)}
        return ours if self.theirs is None else {**ours, "diffusers": lambda: bench.their_step(self.theirs)}


def compare(bench: ZImage | Wan) -> None:
    theirs, ours = bench.theirs(), bench.ours()
    take_weights(ours, theirs, DTYPE)
    check_same(bench.their_step(theirs), bench.our_step(ours)().to(DTYPE))  # type: ignore[arg-type]
    say(f"{bench.config['_class_name']}: outputs of one layer agree at {SMALL[0]} x {SMALL[1]}")


def measure_z_image(configs: Path, until_s: float, alone: bool) -> None:
    network = Transformer(ZImage, json.loads((configs / "Z-Image-Turbo/transformer.json").read_text()), alone)
    bench = network.at((1024, 1024))
    turns("Z-Image-Turbo, 1024 x 1024, a step", network.calls(bench), operations(bench, network.ours), until_s)


def measure_vae(configs: Path, until_s: float, alone: bool) -> None:
    config = json.loads((configs / "Z-Image-Turbo/vae.json").read_text())
    theirs, ours = (None, vae.build(config)) if alone else vae.networks(config, DTYPE)
    if theirs is None:
        vae.make_weights(ours)
    latents = torch.randn(1, 1, 128, 128, 16).to(DTYPE)
    calls: Calls = {"ours": lambda: ours.decode(latents)}
    if theirs is not None:
        z = latents[:, 0].movedim(-1, 1).contiguous()
        small = z[..., :32, :32].contiguous()
        expected = theirs.decode(small / theirs.config.scaling_factor + theirs.config.shift_factor).sample
        check_same(expected.movedim(1, -1), ours.decode(latents[:, :, :32, :32].contiguous())[:, 0].to(DTYPE))
        say("autoencoder: outputs agree at 256 x 256")
        calls |= vae.calls_of(theirs, z)
    with vae.timed(Conv2d, UpsampleConv2d) as spent:
        ours.decode(latents)
    num_operations = sum(own for _, own in spent.values())
    turns("autoencoder, 1024 x 1024, convolutions of a decode", calls, num_operations, until_s)


def measure_wan(configs: Path, until_s: float, alone: bool) -> None:
    network = Transformer(Wan, json.loads((configs / "Wan2.1-T2V-1.3B/transformer.json").read_text()), alone)
    short, whole = (network.at((832, 480), frames) for frames in (6, 21))  # of the latents: 21 and 81 of the video
    of_short, of_whole = (operations(bench, network.ours) for bench in (short, whole))
    left_s = until_s - (perf_counter() - BEGIN_S)
    took_s = turns(
        "Wan 2.1 1.3B, 832 x 480, 21 frames, a step",
        network.calls(short),
        of_short,
        perf_counter() - BEGIN_S + left_s / 3,
    )
    name = "Wan 2.1 1.3B, 832 x 480, 81 frames, a step"
    expected_s = {call: median_s * of_whole / of_short for call, median_s in took_s.items()}
    calls, left_s = Calls(), until_s - (perf_counter() - BEGIN_S)
    for call, run in network.calls(whole).items():
        if sum(expected_s[one] for one in calls) + expected_s[call] > left_s:
            say(
                f"{name}: {call} is left out: about {expected_s[call]:.0f} s by its {of_whole / 1e12:.0f} TFLOP and "
                f"the speed at 21 frames, and {left_s:.0f} s are left"
            )
            break
        calls[call] = run
    if calls:
        turns(name, calls, of_whole, until_s)


MEASURES = {"z-image": measure_z_image, "vae": measure_vae, "wan": measure_wan}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, help="a folder with the two models' configs")
    parser.add_argument("--seconds", type=float, default=150.0, help="for all sections (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=tuple(MEASURES), default=tuple(MEASURES), help="sections")
    parser.add_argument("--alone", action="store_true", help="without diffusers")
    args = parser.parse_args()
    torch.manual_seed(0)
    say(f"{kernels.num_threads()} threads, torch {torch.__version__}")
    alone = args.alone or not has_diffusers()
    # A section that is left out gives its time to those that are run.
    shares = {name: ENDS[name] - before for name, before in zip(ENDS, (0.0, *ENDS.values()), strict=False)}
    used = math.fsum(shares[name] for name in args.only)
    end = 0.0
    with torch.inference_mode():
        for name in (name for name in MEASURES if name in args.only):
            end += shares[name] / used
            MEASURES[name](args.configs, end * args.seconds, alone)
    say("done")


def has_diffusers() -> bool:
    try:
        import diffusers
    except ImportError as error:
        say(f"ours alone: diffusers cannot be imported ({error})")
        return False
    say(f"diffusers {diffusers.__version__}")
    return True


if __name__ == "__main__":
    main()
