"""`tilewright bench image|video`: times a diffusion pipeline per step and per image."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.bench import report
from tilewright.flags import diffusion
from tilewright.flags.options import positive
from tilewright.types import RequestError

if TYPE_CHECKING:  # torch is imported when the benchmark runs: --help is fast
    from tilewright.bench.rounds import Amounts, Round
    from tilewright.diffusion.diffusion import Diffusion
    from tilewright.diffusion.params import GenerationParams

WHAT = {
    "image": "seconds per denoising step and per image, and their parts",
    "video": "seconds per denoising step and per video, and their parts",
}
PROMPT = "a red circle left of a blue square"


def add_arguments(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands `image` and `video`."""
    for name, what in WHAT.items():
        parser = subparsers.add_parser(
            name,
            help=what,
            description=f"Measures {what}. Every round has another seed. The machine's speed is probed between "
            "the rounds.",
            epilog=f"""examples:
  tilewright bench {name} -m MODEL
  tilewright bench {name} -m MODEL --size 512x512 --steps 4 --rounds 3 --json {name}.json""",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help=f"default: {PROMPT}")
        if name == "video":
            parser.add_argument("--frames", type=positive, metavar="N", help="default: the model's")
        else:
            parser.add_argument("-n", type=positive, default=1, metavar="N", help="images at once (default 1)")
        diffusion.add_request_arguments(parser)
        diffusion.add_model_arguments(parser)
        parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="default 3")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the results and the machine")
        parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rounds (needs matplotlib)")
        parser.set_defaults(run=run, what=name)


def run(options: argparse.Namespace) -> int:
    """Run the benchmark and return the exit status."""
    diffusion.check_files(options)
    report.check_outputs(options)
    from tilewright.bench.rounds import as_table, write_json, write_plot

    load_average = report.load_average()
    with diffusion.open_model(options) as model:
        params = _params(model, options)
        rounds = _measure(model, params, options.rounds)
        print(as_table(rounds))
        if options.json:
            about = _about(model, params, options) | {"load_average": load_average, "versions": report.versions()}
            write_json(options.json, rounds, about)
        if options.plot:
            write_plot(options.plot, rounds, f"bench {options.what}, {model.name}")
    return 0


def _params(model: Diffusion, options: argparse.Namespace) -> GenerationParams:
    if options.what == "image":
        return diffusion.request(model, options.prompt, options, num_frames=1, n=options.n, output="array")
    if model.limits.max_frames == 1:
        raise RequestError(f"{model.name} makes images, expected a model that makes videos")
    return diffusion.request(model, options.prompt, options, num_frames=options.frames, output="array")


def _measure(model: Diffusion, params: GenerationParams, num_rounds: int) -> list[Round]:
    from dataclasses import replace

    from tqdm import tqdm

    from tilewright.bench.rounds import Round
    from tilewright.bench.timing import between, probe

    is_quiet = not sys.stderr.isatty()
    model.run(replace(params, num_steps=min(params.num_steps, 2)))  # warms up: loads, and packs weights
    rounds = []
    before = probe()
    for number in tqdm(range(1, num_rounds + 1), file=sys.stderr, unit="round", leave=False, disable=is_quiet):
        amounts = _amounts(model, replace(params, seed=params.seed + number))
        after = probe()
        rounds.append(Round.of(amounts, between(before, after)))
        before = after
    return rounds


def _amounts(model: Diffusion, params: GenerationParams) -> Amounts:
    from tilewright.bench.rounds import Measurement

    timings = model.run(params).timings
    made_s = timings.total_s - timings.load_s
    noun = "video" if params.num_frames > 1 else "picture"
    return {
        "step": Measurement(timings.denoise_s / params.num_steps, "s"),
        noun: Measurement(made_s / params.n, "s"),
        f"{noun}s": Measurement(60 * params.n / made_s, "per minute"),
        "encode the prompt": Measurement(timings.encode_s, "s"),
        "denoise": Measurement(timings.denoise_s, "s"),
        "decode": Measurement(timings.decode_s, "s"),
    }


def _about(model: Diffusion, params: GenerationParams, options: argparse.Namespace) -> dict[str, object]:
    from tilewright.engine.measure import machine

    return {
        "bench": options.what,
        "model": model.name,
        "dtype": options.dtype or "auto",
        "tp": options.tp or 1,
        "settings": {**params.settings(), "n": params.n},
        "machine": machine.as_dict(machine.describe(), machine.measure()),
    }
