"""Ours beside other systems on the same checkpoint, in turns: python benchmarks/peers.py MODEL --transformers PYTHON

Each system is a process of its own that loads the checkpoint once and then waits to be called (peer_workers/). In every
round each workload is run by one after the other, in changing order, while the rest sleep; between them ours measures
how fast the machine is at that moment. Ratios are taken within a round, so that a machine that drifts hits both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from time import perf_counter, sleep

from peer_process import Worker, WorkerError
from peer_report import as_table, summary, write_plot

from tilewright.bench.report import check_outputs, write_document
from tilewright.types import RequestError

WORKERS = Path(__file__).parent / "peer_workers"
DECODED = 64  # tokens of W1
LARGE_SIDE = 1024  # of W3's image, unless told otherwise
# libgomp's threads spin for a few milliseconds after their last region, libiomp's for 200.
SETTLE_S = 0.3
MAX_IDLE_SHARE = 0.05  # of a processor, by all that should sleep
Call = Callable[..., dict]


@dataclass(frozen=True)
class Workload:
    """What is measured: `run(call, seed, full)` gives the figures of one run; not `full`: as little as warms up."""

    name: str
    title: str
    unit: str
    run: Callable[[Call, int, bool], dict[str, float]]
    needs_vision: bool | None = None  # None: both kinds of model
    is_rate: bool = False  # more is better
    has_large_image: bool = False  # of the size that --side says
    is_usual: bool = True  # run if no works are named

    def with_side(self, side: int) -> Workload:
        """The same with another size of a large image."""
        if not self.has_large_image or side == LARGE_SIDE:
            return self
        title = self.title.replace(f"{LARGE_SIDE}x{LARGE_SIDE}", f"{side}x{side}")
        return replace(self, title=title, run=partial(self.run, side=side))


def _decode(call: Call, seed: int, full: bool) -> dict[str, float]:
    # Two prompts of equal length: the second must not find the first one's keys and values.
    first_s = call(call="text", count=1, prompt_tokens=128, new_tokens=1, seed=seed)["seconds"]
    new_tokens = 1 + (DECODED if full else 4)
    all_s = call(call="text", count=1, prompt_tokens=128, new_tokens=new_tokens, seed=seed + 1)["seconds"]
    if not full:
        return {}
    if all_s <= first_s:
        raise WorkerError(f"{new_tokens} tokens took {all_s:.4f} s and one {first_s:.4f} s: nothing can be told")
    return {"figure": (new_tokens - 1) / (all_s - first_s), "first_s": first_s, "all_s": all_s}


def _prefill(call: Call, seed: int, full: bool, prompt_tokens: int = 1024) -> dict[str, float]:
    seconds = call(call="text", count=1, prompt_tokens=prompt_tokens, new_tokens=1, seed=seed)["seconds"]
    return {"figure": prompt_tokens / seconds, "prompt_tokens": prompt_tokens, "all_s": seconds}


def _image(call: Call, seed: int, full: bool, side: int = LARGE_SIDE) -> dict[str, float]:
    sizes = {"width": side, "height": side}
    answer = call(call="image", count=1, prompt_tokens=16, new_tokens=1, seed=seed, **sizes)
    return {"figure": answer["seconds"], "prompt_tokens": answer["prompt_tokens"]}


def _second_question(call: Call, seed: int, full: bool, side: int = LARGE_SIDE) -> dict[str, float]:
    """Another question about an image that was asked about before."""
    sizes = {"width": side, "height": side, "image_seed": seed}
    first = call(call="image", count=1, prompt_tokens=16, new_tokens=1, seed=seed, **sizes)
    answer = call(call="image", count=1, prompt_tokens=16, new_tokens=1, seed=seed + 1, **sizes)
    figures = {"figure": answer["seconds"], "prompt_tokens": answer["prompt_tokens"], "first_s": first["seconds"]}
    return {**figures, "share_of_first": answer["seconds"] / first["seconds"]}


def _decode_beside_image(call: Call, seed: int, full: bool, side: int = LARGE_SIDE) -> dict[str, float]:
    """Tokens after the first one, whose time a worker must tell: an image takes longer than they do."""
    new_tokens = 1 + (DECODED if full else 4)
    sizes = {"width": side, "height": side}
    answer = call(call="image", count=1, prompt_tokens=16, new_tokens=new_tokens, seed=seed, **sizes)
    if "first_token_s" not in answer:
        raise WorkerError("the worker does not tell when the first token came")
    first_s, all_s = answer["first_token_s"], answer["seconds"]
    return {"figure": (new_tokens - 1) / (all_s - first_s), "first_s": first_s, "all_s": all_s}


def _eight_images(call: Call, seed: int, full: bool) -> dict[str, float]:
    sizes = {"width": 448, "height": 448}
    new_tokens = 32 if full else 2
    answer = call(call="image", count=8, prompt_tokens=64, new_tokens=new_tokens, seed=seed, **sizes)
    return {"figure": answer["seconds"], "prompt_tokens": answer["prompt_tokens"]}


def _eight_texts(call: Call, seed: int, full: bool) -> dict[str, float]:
    answer = call(call="text", count=8, prompt_tokens=128, new_tokens=32 if full else 2, seed=seed)
    return {"figure": answer["seconds"]}


WORKLOADS = {
    work.name: work
    for work in (
        Workload("W1", "decode, 128-token prompt, 64 new", "tokens/s", _decode, is_rate=True),
        Workload(
            "W1p",
            "decode beside a 1024x1024 image, 64 new",
            "tokens/s",
            _decode_beside_image,
            needs_vision=True,
            is_rate=True,
            has_large_image=True,
            is_usual=False,
        ),
        Workload("W2", "prefill of 1,024 tokens", "tokens/s", _prefill, is_rate=True),
        Workload(
            "W2l",
            "prefill of 2,048 tokens",
            "tokens/s",
            partial(_prefill, prompt_tokens=2048),
            is_rate=True,
            is_usual=False,
        ),
        Workload(
            "W3",
            "first token, 1024x1024 image + 16 tokens",
            "s",
            _image,
            needs_vision=True,
            has_large_image=True,
        ),
        Workload(
            "W3q",
            "another question about such an image",
            "s",
            _second_question,
            needs_vision=True,
            has_large_image=True,
        ),
        Workload("W4", "8 requests, 448x448 image + 64 tokens, 32 new", "s", _eight_images, needs_vision=True),
        Workload("W4c", "the same 8 requests again", "s", _eight_images, needs_vision=True),
        Workload("W4t", "8 requests, 128 tokens, 32 new", "s", _eight_texts, needs_vision=False),
    )
}


@dataclass
class Session:
    """The workers that are alive, and all that was measured."""

    ours: Worker
    rivals: list[Worker]
    rows: list[dict] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def workers(self) -> list[Worker]:
        return [self.ours, *self.rivals]

    def run_round(self, number: int, works: list[Workload], full: bool) -> None:
        """Every workload by every system; what is not `full` warms up and leaves no rows."""
        before = self.ours.call(call="probe")
        for index, work in enumerate(works):
            order = self.workers if number % 2 else self.workers[::-1]
            # W4c comes again with what W4 had.
            seed = 10 * (number * len(WORKLOADS) + list(WORKLOADS).index("W4" if work.name == "W4c" else work.name))
            rows = [row for worker in order if (row := self._run(work, worker, seed, full))]
            sleep(SETTLE_S)
            after = self.ours.call(call="probe")
            if full:
                self.rows += [{"round": number, **row, "probe": {"before": before, "after": after}} for row in rows]
                done = ", ".join(f"{row['system']} {row['figure']:.4g}" for row in rows)
                print(f"round {number}, {work.name} ({index + 1} of {len(works)}): {done} {work.unit}", file=sys.stderr)
            before = after

    def _run(self, work: Workload, worker: Worker, seed: int, full: bool) -> dict | None:
        """One system's figures; None for one that failed, which is then left out of the rest."""
        if work.name == "W4c" and not worker.details["keeps_prefixes"]:
            return self._same_as_first(worker) if full else None
        idle = [other for other in self.workers if other is not worker]
        sleep(SETTLE_S)
        begin, cpu_before = perf_counter(), sum(other.cpu_seconds() for other in idle)
        try:
            figures = work.run(worker.call, seed, full)
        except WorkerError as error:
            if worker is self.ours:
                raise
            print(f"peers: {error}", file=sys.stderr)
            self.failures.append(str(error))
            self.rivals.remove(worker)
            worker.close(at_once=True)
            return None
        idle_share = (sum(other.cpu_seconds() for other in idle) - cpu_before) / (perf_counter() - begin)
        if idle_share > MAX_IDLE_SHARE and full:
            print(f"peers: while {worker.name} ran {work.name}, others used {idle_share:.0%} of a CPU", file=sys.stderr)
        return {
            "work": work.name,
            "system": worker.name,
            **figures,
            "idle_share": idle_share,
            "resident_bytes": worker.resident_bytes(),
        }

    def _same_as_first(self, worker: Worker) -> dict | None:
        """W4's figures for a system that keeps nothing: a second time takes it as long as the first."""
        for row in reversed(self.rows):
            if row["work"] == "W4" and row["system"] == worker.name:
                return {key: value for key, value in row.items() if key not in ("round", "probe")} | {"work": "W4c"}
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/peers.py",
        description="Measures Tilewright beside other systems on one checkpoint, call by call in turns.",
        epilog="workloads:\n"
        + "\n".join(f"  {work.name:<4} {work.title}, {work.unit}" for work in WORKLOADS.values())
        + """

examples:
  python benchmarks/peers.py CHECKPOINT --transformers .peers/hf/bin/python
  python benchmarks/peers.py CHECKPOINT --transformers PY --vllm PY --rounds 7 --json peers.json --plot peers.png
  python benchmarks/peers.py CHECKPOINT --works W1,W2 --rounds 1      ours alone, once
  python benchmarks/peers.py CHECKPOINT --rival "PY other_worker.py"   any program that obeys peer_workers/worker.py""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--transformers", metavar="PYTHON", help="Python of an environment with transformers")
    parser.add_argument(
        "--transformers-dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="what transformers computes in (default auto: the one in which its torch multiplies faster here)",
    )
    parser.add_argument("--vllm", metavar="PYTHON", help="Python of an environment with vLLM's CPU build")
    parser.add_argument("--rival", action="append", default=[], metavar="COMMAND", help="another worker's command line")
    parser.add_argument(
        "--works", type=_works, metavar="W1,W2,...", help="default: all the model can do, but W1p and W2l"
    )
    parser.add_argument(
        "--side", type=int, default=LARGE_SIDE, metavar="PIXELS", help=f"of the large image (default {LARGE_SIDE})"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="runs of each workload by each (default 5)")
    parser.add_argument(
        "--engine", action="append", default=[], metavar="NAME=VALUE", help="an option of ours, such as speculate=4"
    )
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="seconds a call may take (default 900)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured, after every round")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it (needs matplotlib)")
    return parser


def _works(text: str) -> list[Workload]:
    unknown = [name for name in text.split(",") if name not in WORKLOADS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(WORKLOADS)}")
    return [work for name, work in WORKLOADS.items() if name in text.split(",")]


def _engine_options(pairs: list[str]) -> dict[str, object]:
    options: dict[str, object] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _commands(options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Name and command line of each system, ours first."""
    folder = str(options.model)
    engine = json.dumps(_engine_options(options.engine))
    commands = [("ours", [sys.executable, str(WORKERS / "ours.py"), folder, engine])]
    if options.transformers:
        worker = [options.transformers, str(WORKERS / "transformers_worker.py"), folder, options.transformers_dtype]
        commands.append(("transformers", worker))
    if options.vllm:
        commands.append(("vllm", [options.vllm, str(WORKERS / "vllm_worker.py"), folder]))
    for number, line in enumerate(options.rival, 1):
        commands.append((f"rival {number}", [*shlex.split(line), folder]))
    return commands


def _start(options: argparse.Namespace, logs: Path, started: list[Worker]) -> Session:
    """All systems, loaded one after the other; one that cannot be loaded is an error."""
    for name, command in _commands(options):
        print(f"loading {name}", file=sys.stderr)
        worker = Worker(name, command, logs / f"{name}.log", options.timeout)
        started.append(worker)
        worker.wait_until_ready()
        print(f"{name} is ready after {worker.details['load_s']:.1f} s: {worker.details['versions']}", file=sys.stderr)
    return Session(started[0], started[1:])


def _document(options: argparse.Namespace, session: Session, works: list[Workload], systems: list[Worker]) -> dict:
    costs, machine = session.ours.details["costs"], session.ours.details["machine"]
    described = {
        worker.name: {key: value for key, value in worker.details.items() if key not in ("costs", "machine")}
        | {
            "resident_bytes": max(
                (row["resident_bytes"] for row in session.rows if row["system"] == worker.name), default=0
            )
        }
        for worker in systems
    }
    titles = {work.name: {"title": work.title, "unit": work.unit, "is_rate": work.is_rate} for work in works}
    return {
        "model": options.model.resolve().name,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rounds": options.rounds,
        "engine_options": _engine_options(options.engine),
        "load_average": os.getloadavg()[0],
        "machine": machine,
        "costs": costs,
        "systems": described,
        "works": titles,
        "summary": summary(session.rows, titles, costs),
        "failures": session.failures,
        "rows": session.rows,
    }


def _measure(options: argparse.Namespace, session: Session) -> dict:
    systems = session.workers
    has_vision = session.ours.details["has_vision"]
    usual = [work for work in WORKLOADS.values() if work.is_usual and work.needs_vision in (None, has_vision)]
    works = [work.with_side(options.side) for work in options.works or usual]
    unfit = [work.name for work in works if work.needs_vision and not has_vision]
    if unfit:
        raise WorkerError(f"{unfit[0]} needs a model that sees, which {options.model.name} does not")
    if any(work.name == "W4c" for work in works) and all(work.name != "W4" for work in works):
        raise WorkerError("W4c is W4 a second time: ask for both")
    print("warming up", file=sys.stderr)
    session.run_round(0, works, full=False)
    document = {}
    for number in range(1, options.rounds + 1):
        session.run_round(number, works, full=True)
        document = _document(options, session, works, systems)
        if options.json:
            write_document(options.json, document)
    return document


def main() -> int:
    """The exit status: 0, 1 if a system failed on the way, 2 if nothing could be measured."""
    options = _parser().parse_args()
    if not (options.model / "config.json").is_file():
        print(f"peers: {options.model} is no folder of a checkpoint: it has no config.json", file=sys.stderr)
        return 2
    started: list[Worker] = []
    with tempfile.TemporaryDirectory() as logs:
        try:
            check_outputs(options)
            session = _start(options, Path(logs), started)
            document = _measure(options, session)
        except (WorkerError, RequestError) as error:
            print(f"peers: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("peers: interrupted", file=sys.stderr)
            return 130
        finally:
            for worker in started:
                worker.close()
    print(as_table(document))
    if options.plot:
        write_plot(options.plot, document)
    return 1 if session.failures else 0


if __name__ == "__main__":
    sys.exit(main())
