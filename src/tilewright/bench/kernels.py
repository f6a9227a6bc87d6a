"""`tilewright bench kernels`: compares every kernel, at shapes of real models, with torch and the machine's limit."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.flags.options import positive

if TYPE_CHECKING:  # torch is imported when the benchmark runs: --help is fast
    from tilewright.bench.report import BenchResult, MachineLimits
    from tilewright.bench.row import Row


def add_arguments(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `kernels`."""
    parser = subparsers.add_parser(
        "kernels",
        help="compare every kernel with torch and the machine's limit",
        description="Times each kernel at the shapes of Qwen3-VL 2B and 8B and of Qwen3.5's linear attention, "
        "alternating with torch ops of the same result. A kernel that disagrees with its twin gets no figure, and "
        "the exit status is 1.",
        epilog="""examples:
  tilewright bench kernels                              all of them
  tilewright bench kernels --filter "linear 2B"         rows whose name and shape have these words
  tilewright bench kernels --json k.json --plot k.png   for programs, and as a roofline""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--filter", default="", metavar="TEXT", help="only rows whose name and shape contain all these words"
    )
    parser.add_argument("--rounds", type=positive, default=15, metavar="N", help="samples of each side (default 15)")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of both sides (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results and the machine to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a roofline to FILE (needs matplotlib)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the benchmark; return 0, 1 if a check failed, or 2 if no row matches."""
    from tilewright.bench import report

    report.check_outputs(options)
    import torch

    from tilewright.bench.rows import all_rows
    from tilewright.bench.torch_dtype import by_product
    from tilewright.engine.measure import machine
    from tilewright.ops.native import kernels

    words = options.filter.split()
    rows = [row for row in all_rows() if all(word in f"{row.name} {row.shape} {row.group}" for word in words)]
    if not rows:
        print(f"tilewright: no row contains the words of --filter {options.filter!r}", file=sys.stderr)
        return 2
    if options.threads:
        kernels.set_num_threads(options.threads)
    torch.set_num_threads(kernels.num_threads())
    load = report.load_average()
    measured = machine.measure()
    limits = report.MachineLimits(measured.read_gb_s, measured.bf16_tflops)
    results = _measure(rows, options.rounds, limits)
    torch_dtypes = by_product()
    print(report.as_table(results, limits, torch_dtypes))
    if options.json:
        about = {
            "machine": machine.as_dict(machine.describe(), measured),
            "versions": report.versions(),
            "rounds": options.rounds,
            "load_average": load,
            "torch_dtypes": torch_dtypes,
        }
        report.write_json(options.json, results, about)
    if options.plot:
        report.write_plot(options.plot, results, limits)
    return 1 if any(result.times is None for result in results) else 0


def _measure(rows: "list[Row]", rounds: int, limits: "MachineLimits") -> "list[BenchResult]":
    from tqdm import tqdm

    from tilewright.bench.report import BenchResult
    from tilewright.bench.timing import interleaved

    results = []
    progress = tqdm(rows, file=sys.stderr, unit="row", leave=False)
    for row in progress:
        progress.set_description(f"{row.name} {row.shape}")
        calls = row.prepare()
        times = interleaved(calls, rounds) if calls.check() else None
        limit_s = limits.seconds(row.bytes_moved, row.flops)
        results.append(BenchResult(row.name, row.shape, row.group, row.bytes_moved, row.flops, limit_s, times))
    return results
