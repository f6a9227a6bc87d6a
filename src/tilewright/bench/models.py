"""`tilewright bench decode|prefill|picture|batch`: a whole model compared with the machine's current limits."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.bench import report
from tilewright.flags import engine as engine_flags
from tilewright.flags.options import positive

if TYPE_CHECKING:  # torch is imported when the benchmark runs: --help is fast
    from tilewright.bench.rounds import Round
    from tilewright.engine.engine import Engine

WHAT = {
    "decode": "tokens per second of one answer, and the share of the read bandwidth",
    "prefill": "tokens per second of one prompt, and the share of a large matrix product's speed",
    "picture": "time to the first token of a question about an image, and its parts",
    "batch": "many requests at once, then the same requests from the caches",
}
DEFAULTS = {  # prompt tokens, new tokens, size of images
    "decode": (128, 64, None),
    "prefill": (1024, 1, None),
    "picture": (16, 1, (1024, 1024)),
    "batch": (64, 32, (448, 448)),
}


def add_arguments(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands `decode`, `prefill`, `picture` and `batch`."""
    for name, what in WHAT.items():
        prompt_tokens, new_tokens, size = DEFAULTS[name]
        parser = subparsers.add_parser(
            name,
            help=what,
            description=f"Measures {what}. Prompts are random and new in every round; answers are greedy and have "
            "the full length. The machine's speed is probed between the rounds.",
            epilog=f"""examples:
  tilewright bench {name}                                 the embedded model
  tilewright bench {name} -m MODEL
  tilewright bench {name} -m MODEL --rounds 9 --json {name}.json --plot {name}.png""",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _number(parser, "--prompt-tokens", prompt_tokens, "random tokens of a prompt")
        if name in ("decode", "batch"):
            _number(parser, "--new-tokens", new_tokens, "tokens of an answer")
        if name == "batch":
            _number(parser, "--batch", 8, "requests at once")
        if size:
            help_text = f"size of the images (default {size[0]}x{size[1]})"
            parser.add_argument("--size", type=report.size, default=size, metavar="WxH", help=help_text)
        _number(parser, "--rounds", 5, "number of measurements")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the results and the machine")
        parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rounds (needs matplotlib)")
        engine_flags.add_arguments(parser, speculate=0)
        parser.set_defaults(run=run, what=name, new_tokens=new_tokens)


def _number(parser: argparse.ArgumentParser, flag: str, default: int, what: str) -> None:
    parser.add_argument(flag, type=positive, default=default, metavar="N", help=f"{what} (default {default})")


def run(options: argparse.Namespace) -> int:
    """Run the benchmark and return the exit status."""
    if options.what == "decode" and options.new_tokens < 2:
        print("tilewright: --new-tokens is 1, expected 2 or more: the first belongs to prefill", file=sys.stderr)
        return 2
    engine_flags.check_model(options.model, options.mmproj)
    report.check_outputs(options)
    from tilewright.bench.rounds import as_table, write_json, write_plot

    load_average = report.load_average()
    if options.max_sequences is None:
        options.max_sequences = max(8, getattr(options, "batch", 1))
    with engine_flags.open_engine(options, progress=sys.stderr.isatty()) as engine:
        rounds = _measure(engine, options)
        print(as_table(rounds))
        if options.json:
            about = _about(engine, options) | {"load_average": load_average, "versions": report.versions()}
            write_json(options.json, rounds, about)
        if options.plot:
            title = f"bench {options.what}, {engine.loaded.name}"
            write_plot(options.plot, rounds, title)
    return 0


def _measure(engine: Engine, options: argparse.Namespace) -> list[Round]:
    from tqdm import tqdm

    from tilewright.bench.rounds import MEASURES, Round
    from tilewright.bench.timing import between, probe

    measure = MEASURES[options.what](engine, options)
    measure(0)  # warms up
    rounds = []
    before = probe()
    progress = range(1, options.rounds + 1)
    for number in tqdm(progress, file=sys.stderr, unit="round", leave=False, disable=not sys.stderr.isatty()):
        amounts = measure(number)
        after = probe()
        rounds.append(Round.of(amounts, between(before, after)))
        before = after
    return rounds


def _about(engine: Engine, options: argparse.Namespace) -> dict[str, object]:
    from dataclasses import asdict

    from tilewright.bench.rounds import costs
    from tilewright.engine.measure import machine

    names = ("prompt_tokens", "new_tokens", "batch", "size", "speculate", "max_tokens_per_step", "prefix_cache")
    settings = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    return {
        "bench": options.what,
        "model": engine.loaded.name,
        "dtype": str(engine.loaded.dtype).removeprefix("torch."),
        "settings": settings,
        "costs": asdict(costs(engine)),
        "machine": machine.as_dict(machine.describe(), machine.measure()),
    }
