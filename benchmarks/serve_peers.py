"""Our server beside vLLM's, measured from outside by `tilewright bench serve`'s own code:

    python benchmarks/serve_peers.py CHECKPOINT --vllm PYTHON --rounds 5 --json serve_peers.json --plot serve_peers.png

In every round each server is started anew, warmed up, asked and ended, one after the other in changing order, so that
neither holds memory or threads while the other works; between them the machine is probed. Both get the same requests:
eight chats at once, each with an image of its own, so that no cache helps. They must count the same prompt tokens and
give all the tokens that were asked for, or the figures are not taken. Ratios are taken within a round.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from time import sleep

from peer_report import as_table, summary, write_plot
from server_process import ServerError, ServerProcess

from tilewright.bench.http_client import Client, ServerAddress
from tilewright.bench.report import check_outputs, size, write_document
from tilewright.bench.serve.run import ClosedLoop, first_model, measure, measure_limits
from tilewright.bench.serve.summary import Summary, summarise
from tilewright.bench.serve.workload import Workload
from tilewright.process import run_loop
from tilewright.types import RequestError

SETTLE_S = 1.0  # after a server's end, before the machine is probed


@dataclass(frozen=True)
class Figure:
    """An amount that a run has."""

    title: str
    unit: str
    is_rate: bool = False  # more is better


FIGURES = {
    "TTFT p50": Figure("until the first token", "s"),
    "TTFT p95": Figure("until the first token, the slowest 5 %", "s"),
    "TPOT p50": Figure("per token after the first", "ms"),
    "E2E p50": Figure("the whole answer", "s"),
    "output": Figure("tokens of all answers", "tokens/s", is_rate=True),
    "requests": Figure("answers", "requests/s", is_rate=True),
}


def figures_of(run: Summary) -> dict[str, float]:
    """Those of FIGURES that the run has."""
    found = {"output": run.output_tokens_per_s, "requests": run.requests_per_s}
    for name, key, part, scale in (
        ("TTFT p50", "ttft", "p50", 1),
        ("TTFT p95", "ttft", "p95", 1),
        ("TPOT p50", "tpot", "p50", 1000),
        ("E2E p50", "e2e", "p50", 1),
    ):
        if key in run.distributions:
            found[name] = getattr(run.distributions[key], part) * scale
    return found


@dataclass(frozen=True)
class System:
    """How a server is started."""

    name: str
    command: list[str]  # {port} stands for the port
    environment: dict[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()  # whose versions are told

    def versions(self) -> dict[str, str]:
        program = (
            "import importlib.metadata as m, json, sys; installed = {d.name for d in m.distributions()}; "
            "print(json.dumps({name: m.version(name) for name in sys.argv[1:] if name in installed}))"
        )
        command = [self.command[0], "-c", program, *self.packages]
        return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def ours(options: argparse.Namespace) -> System:
    command = [sys.executable, "-m", "tilewright", "serve", str(options.model), "--port", "{port}"]
    return System("ours", [*command, *shlex.split(options.ours_args)], {}, ("tilewright", "torch"))


def vllm(options: argparse.Namespace) -> System:
    """vLLM's CPU build as it serves best on few cores.

    Eager: compiling Qwen3-VL was not done after 400 s. Threads on all CPUs: left to itself it keeps one of them for the
    part that speaks HTTP. Its caches stay on, as by default. One image per prompt, and no room held for more.
    """
    command = [options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(options.model)]
    flags = {
        "--host": "127.0.0.1",
        "--port": "{port}",
        "--dtype": "bfloat16",
        "--max-model-len": "4096",
        "--max-num-seqs": str(options.concurrency),
        "--max-num-batched-tokens": "4096",
        "--limit-mm-per-prompt": '{"image": 1, "video": 0}',
        "--seed": "0",
    }
    command += [part for pair in flags.items() for part in pair] + ["--enforce-eager", "--skip-mm-profiling"]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; eight of these chats take 0.4
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        **dict(pair.split("=", 1) for pair in options.vllm_env),
    }
    packages = ("vllm", "vllm-cpu", "torch", "transformers")
    return System("vllm", [*command, *shlex.split(options.vllm_args)], environment, packages)


@dataclass(frozen=True)
class Run:
    """One server's run in one round."""

    summary: Summary
    prompt_tokens: tuple[int | None, ...]
    load_s: float
    resident_bytes: int
    client_cpu_share: float


def run_server(system: System, workload: Workload, options: argparse.Namespace, log: Path) -> Run:
    """Starts a server, measures it and ends it; ServerError if an answer is missing or too short."""
    with ServerProcess(system.name, system.command, system.environment, log) as process:
        load_s = process.wait_until_ready(options.timeout_s)
        client = Client(ServerAddress.parse(process.url))
        try:
            workload = replace(workload, model=run_loop(first_model(client, "text")))
        except RequestError as error:
            raise process.failure(f"named no model: {error}") from error
        requests = list(workload.requests(range(-options.warmup, options.requests)))
        warmup, counted = requests[: options.warmup], requests[options.warmup :]
        pace = ClosedLoop(options.concurrency)
        measured = run_loop(measure(client, workload.path, warmup, counted, pace, options.timeout_s))
        found = summarise(measured.samples)
        if found.num_failed or found.num_shorter:
            shorter = f"{found.num_shorter} answers were shorter than asked"
            raise process.failure(f"did not answer all of {len(counted)}: failures {found.failures}, {shorter}")
        counts = tuple(sample.prompt_tokens for sample in measured.samples)
        return Run(found, counts, load_s, process.resident_bytes(), measured.client_cpu_share)


class Comparison:
    """The systems that are still in, and all that was measured."""

    def __init__(self, options: argparse.Namespace, systems: Sequence[System], log_folder: Path) -> None:
        self.options = options
        self.systems = list(systems)
        self.log_folder = log_folder
        self.details = {system.name: {"versions": system.versions(), "command": system.command} for system in systems}
        self.rows: list[dict] = []
        self.runs: list[dict] = []
        self.failures: list[str] = []
        self.machine: dict = {}

    def run_round(self, number: int, workload: Workload) -> None:
        """Every server once, with requests that no other round has."""
        workload = replace(workload, seed=workload.seed + number)
        counts: dict[str, tuple] = {}
        before = self._probe()
        for system in self.systems[:: 1 if number % 2 else -1]:
            print(f"round {number}: {system.name}", file=sys.stderr)
            try:
                run = run_server(system, workload, self.options, self.log_folder / f"{system.name}.log")
            except ServerError as error:
                if system.name == "ours":
                    raise
                print(f"serve_peers: {error}", file=sys.stderr)
                self.failures.append(str(error))
                self.systems.remove(system)
                continue
            after = self._probe()
            counts[system.name] = run.prompt_tokens
            self._add(number, system.name, run, {"before": before, "after": after})
            before = after
        if len(set(counts.values())) > 1:
            raise ServerError(f"the servers count different prompt tokens, which is other work: {counts}")

    def _probe(self) -> dict[str, float]:
        sleep(SETTLE_S)
        measured = measure_limits()
        self.machine = measured["machine"]
        return measured["probe"]

    def _add(self, number: int, name: str, run: Run, probe: Mapping[str, object]) -> None:
        figures = figures_of(run.summary)
        self.rows += [
            {"round": number, "work": work, "system": name, "figure": figure, "probe": probe}
            for work, figure in figures.items()
        ]
        self.runs.append({"round": number, "system": name, "probe": probe} | asdict(run))
        details = self.details[name]
        details["load_s"] = run.load_s
        details["resident_bytes"] = max(run.resident_bytes, details.get("resident_bytes", 0))
        told = ", ".join(f"{work} {figure:.4g} {FIGURES[work].unit}" for work, figure in figures.items())
        print(f"round {number}, {name}: {told}; ready after {run.load_s:.1f} s", file=sys.stderr)

    def document(self, workload: Workload) -> dict:
        works = {name: asdict(FIGURES[name]) for name in FIGURES if any(row["work"] == name for row in self.rows)}
        measured = {row["system"] for row in self.rows}
        return {
            "model": self.options.model.resolve().name,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "load_average": os.getloadavg()[0],
            "machine": self.machine,
            "workload": asdict(workload),
            "load": {name: getattr(self.options, name) for name in ("concurrency", "requests", "warmup", "rounds")},
            "systems": {name: details for name, details in self.details.items() if name in measured},
            "works": works,
            "summary": summary(self.rows, works, {}),
            "failures": self.failures,
            "rows": self.rows,
            "runs": self.runs,
        }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks/serve_peers.py",
        description="Measures our server and vLLM's on one checkpoint, from outside, in turns.",
        epilog="""examples:
  python benchmarks/serve_peers.py CHECKPOINT --vllm .peers/vllm/bin/python --rounds 5 --json serve_peers.json
  python benchmarks/serve_peers.py CHECKPOINT --rounds 1                            ours alone
  python benchmarks/serve_peers.py CHECKPOINT --vllm PYTHON --no-ours --rounds 1 --requests 2 --warmup 1
  python benchmarks/serve_peers.py CHECKPOINT --vllm PYTHON --vllm-env VLLM_CPU_OMP_THREADS_BIND=auto""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--vllm", metavar="PYTHON", help="Python of an environment with vLLM's CPU build")
    parser.add_argument("--vllm-args", default="", metavar="FLAGS", help="more flags of vLLM's server, as one text")
    parser.add_argument("--vllm-env", action="append", default=[], metavar="NAME=VALUE", help="a variable of vLLM's")
    parser.add_argument("--ours-args", default="", metavar="FLAGS", help="more flags of tilewright serve, as one text")
    parser.add_argument("--no-ours", action="store_true", help="measure the other alone")
    for flag, default, what in (
        ("--rounds", 5, "how often each server is started and measured"),
        ("--concurrency", 8, "requests under way at any time"),
        ("--requests", 24, "requests of a run"),
        ("--warmup", 8, "requests before them"),
        ("--pictures", 1, "of each request"),
        ("--prompt-tokens", 64, "words of each request"),
        ("--output-tokens", 64, "tokens of each answer"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{what} (default {default})")
    parser.add_argument("--picture-size", type=size, default=(512, 512), metavar="WxH", help="default 512x512")
    parser.add_argument(
        "--timeout-s", type=float, default=900, metavar="S", help="for a start, and for an answer (default 900)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured, after every round")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it (needs matplotlib)")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep what the servers print")
    return parser


def _measure(options: argparse.Namespace, systems: Sequence[System], log_folder: Path) -> tuple[Comparison, dict]:
    workload = Workload(
        model="",  # each server's own name for it
        prompt_tokens=(options.prompt_tokens, options.prompt_tokens),
        output_tokens=(options.output_tokens, options.output_tokens),
        pictures=options.pictures,
        picture_size=options.picture_size,
    )
    comparison = Comparison(options, systems, log_folder)
    document: dict = {}
    for number in range(1, options.rounds + 1):
        comparison.run_round(number, workload)
        document = comparison.document(workload)
        if options.json:
            write_document(options.json, document)
    return comparison, document


def main() -> int:
    """The exit status: 0, 1 if a rival failed on the way, 2 if nothing could be measured."""
    options = _parser().parse_args()
    systems = ([] if options.no_ours else [ours(options)]) + ([vllm(options)] if options.vllm else [])
    if not systems:
        print("serve_peers: with --no-ours and without --vllm there is nothing to measure", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            check_outputs(options)
            if options.logs:
                options.logs.mkdir(parents=True, exist_ok=True)
            comparison, document = _measure(options, systems, options.logs or Path(folder))
        except (ServerError, RequestError) as error:
            print(f"serve_peers: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("serve_peers: interrupted", file=sys.stderr)
            return 130
    if not document["rows"]:
        return 2
    print(as_table(document))
    if options.plot:
        write_plot(options.plot, document)
    return 1 if comparison.failures else 0


if __name__ == "__main__":
    sys.exit(main())
