"""What a request may leave out, and what that costs: python benchmarks/savings.py [MODEL] [--prompts 12] [--steps 24]

Pictures of the embedded model, or of MODEL, made whole and with each saving, in turns, from the same seeds: how much of
the CPU's time for a picture is left (median of the ratios; decoding is in it, other programs are not), and how far the
pictures are from the whole ones, as PSNR in dB (median, and the worst; 40 is hardly seen, 20 plainly).
`guidance_interval` is compared with a guided run.
The last line is the text cache: a prompt that is encoded for the first time, and the second.
"""

from __future__ import annotations

import argparse
import statistics
from time import process_time
from typing import Any

import numpy as np

from tilewright import Diffusion

SAVINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # the whole, and what is changed in it
    *(({}, {"step_cache": threshold}) for threshold in (0.02, 0.05, 0.1, 0.2)),
    *(({"guidance": 2.0}, {"guidance_interval": (0.0, end)}) for end in (0.8, 0.5)),
]
PROMPTS = [
    f"a {first} {shape} {place} a {second} {other}"
    for first, second in (("red", "blue"), ("green", "yellow"))
    for shape, other in (("circle", "square"), ("triangle", "circle"))
    for place in ("left of", "above", "below")
]


def psnr(found: np.ndarray, whole: np.ndarray) -> float:
    error = float(np.mean((found.astype(np.float64) - whole) ** 2))
    return 99.0 if error == 0 else 10 * np.log10(255**2 / error)


def made(diffusion: Diffusion, prompt: str, settings: dict[str, Any]) -> tuple[float, np.ndarray]:
    """Seconds of CPU, and the picture."""
    begin_s = process_time()
    generated = diffusion.generate(prompt, **settings)
    return process_time() - begin_s, np.stack(generated.images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: the embedded one")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=24, help="default: %(default)s")
    args = parser.parse_args()
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(args.prompts)]
    with Diffusion(args.model) as diffusion:
        first_s = diffusion.generate("a white ring", num_steps=2).timings.encode_s
        second_s = diffusion.generate("a white ring", num_steps=2).timings.encode_s
        for base, saving in SAVINGS:
            ratios, likeness = [], []
            for seed, prompt in enumerate(prompts):
                settings = {"num_steps": args.steps, "seed": seed, "output": "array", **base}
                (whole_s, whole), (saved_s, saved) = (made(diffusion, prompt, settings | more) for more in ({}, saving))
                ratios.append(saved_s / whole_s)
                likeness.append(psnr(saved, whole))
            (name,), (value,) = saving.keys(), saving.values()
            print(
                f"{name} {value}: {statistics.median(ratios):.2f} of the time ({min(ratios):.2f}-{max(ratios):.2f}), "
                f"PSNR {statistics.median(likeness):.1f} dB, worst {min(likeness):.1f}",
                flush=True,
            )
    print(f"text cache: {1000 * first_s:.1f} ms for a prompt, {1000 * second_s:.2f} ms for the same again")


if __name__ == "__main__":
    main()
