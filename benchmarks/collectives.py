"""All-reduces between the processes of this machine: our shared memory and torch's gloo, by turns.

    python benchmarks/collectives.py [--ranks 2 4] [--sizes 8192 8388608] [--rounds 15] [--dtype bfloat16] [--json FILE]

Each rank is a process bound to its share of the CPUs. A round is some calls of one kind, then as many of the other:
both meet the same neighbours. Of a busy machine read the fastest twentieth: others only ever add. In the median they
have their part, more of gloo's, which needs two threads of each rank to have a CPU at once.
`fused` is all_reduce_norm of rows of 4,096; gloo's is its all_reduce followed by our rms_norm.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from time import perf_counter

import torch

from tilewright import config
from tilewright.ops.native import kernels
from tilewright.ops.norm import rms_norm
from tilewright.parallel.gloo import GlooGroup
from tilewright.parallel.rendezvous import Rendezvous, make_group, open_rendezvous

SIZES = [8 << 10, 64 << 10, 512 << 10, 1 << 20, 8 << 20]
WIDTH = 4096
ROUND_BYTES = 16 << 20  # of messages in a round: 2 calls of 8 MB, 50 at most


def plain_gloo(group: GlooGroup):
    """Gloo's own all_reduce, which promises no order of sums."""
    return lambda x: group._gloo.allreduce([x]).wait()


def calls_of(shared, gloo, x, residual, weight):
    """By workload: what is timed of ours and of gloo's."""
    gloo_all_reduce = plain_gloo(gloo)

    def gloo_fused(x):
        gloo_all_reduce(x)
        rms_norm(x, weight, 1e-6, residual=residual, out=x)

    workloads = {"all_reduce": (shared.all_reduce, gloo_all_reduce)}
    if x.numel() % WIDTH == 0:
        ours = lambda x: shared.all_reduce_norm(x, residual, weight, 1e-6, out=x)  # noqa: E731
        workloads["fused"] = (ours, gloo_fused)
    return workloads


def time_calls(call, x, group, num_calls):
    """Seconds of each call."""
    x.zero_()  # sums of sums grow without bound
    group.barrier()
    times = []
    for _ in range(num_calls):
        began_s = perf_counter()
        call(x)
        times.append(perf_counter() - began_s)
    return times


def measure(rank, shared, gloo, options):
    """[{workload, bytes, ranks, ours: [seconds of each call], gloo: [...]}]"""
    results = []
    dtype = getattr(torch, options.dtype)
    for size_bytes in options.sizes:
        count = size_bytes // dtype.itemsize
        x = torch.zeros(count, dtype=dtype)
        shape = (count // WIDTH, WIDTH) if count % WIDTH == 0 else (1, count)
        x, residual, weight = x.view(shape), torch.zeros(shape, dtype=dtype), torch.ones(shape[1])
        num_calls = max(2, min(50, ROUND_BYTES // size_bytes))
        for workload, (ours, theirs) in calls_of(shared, gloo, x, residual, weight).items():
            times = {"ours": [], "gloo": []}
            for round_ in range(options.rounds + 1):
                for kind, call in (("ours", ours), ("gloo", theirs)):
                    seconds = time_calls(call, x, shared, num_calls)
                    times[kind] += seconds if round_ else []  # the first warms up
            results.append({"workload": workload, "bytes": size_bytes, "ranks": shared.size} | times)
    return results


def rank_main(rank, rendezvous, options):
    cpus = config.current().available_cpus
    os.sched_setaffinity(0, {cpus[(rank * options.threads + i) % len(cpus)] for i in range(options.threads)})
    kernels.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    shared, gloo = (make_group(Rendezvous.from_json(text), rank) for text in rendezvous)
    results = measure(rank, shared, gloo, options)
    if rank == 0:
        print(json.dumps(results))


def run_ranks(num_ranks, options):
    threads = max(1, len(config.current().available_cpus) // num_ranks)
    slots = {"slot_bytes": options.slot_bytes} if options.slot_bytes else {}
    with open_rendezvous(num_ranks, **slots) as shared, open_rendezvous(num_ranks, host="127.0.0.1") as gloo:
        arguments = [*sys.argv, "--threads", str(threads)]
        arguments += ["--rendezvous", shared.rendezvous.to_json(), gloo.rendezvous.to_json()]
        processes = [
            subprocess.Popen(
                [sys.executable, *arguments, "--rank", str(rank)], pass_fds=shared.pass_fds, stdout=subprocess.PIPE
            )
            for rank in range(num_ranks)
        ]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a rank of {num_ranks} failed")
    return json.loads(outputs[0])


def print_row(row):
    fast_ours, fast_gloo = (statistics.quantiles(row[kind], n=20)[0] * 1e6 for kind in ("ours", "gloo"))
    ours, gloo = (statistics.median(row[kind]) * 1e6 for kind in ("ours", "gloo"))
    print(
        f"{row['ranks']:5}  {row['workload']:10}  {row['bytes'] / 1024:6.0f}  {fast_ours:9.1f}  {fast_gloo:9.1f}  "
        f"{fast_gloo / fast_ours:6.1f} x  {ours:9.1f}  {gloo:9.1f}  {gloo / ours:6.1f} x"
    )


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--slot-bytes", type=int, help="of the shared memory, instead of the default")
    parser.add_argument("--json", help="a file for all times")
    for internal in ("--rank", "--threads"):
        parser.add_argument(internal, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = parse_options()
    if options.rank is not None:
        return rank_main(options.rank, options.rendezvous, options)
    print(f"{options.dtype}, {os.cpu_count()} CPUs, {kernels.active_isa()}")
    print("                               fastest twentieth of calls          median of calls")
    print("ranks  workload        KB    ours us    gloo us     ratio    ours us    gloo us     ratio")
    results = []
    for num_ranks in options.ranks:
        for row in run_ranks(num_ranks, options):
            print_row(row)
            results.append(row)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
