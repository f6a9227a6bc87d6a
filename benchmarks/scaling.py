"""How packed linears and torch's gain from more threads: python benchmarks/scaling.py [THREADS]

For each shape, one thread and THREADS (default: all) take turns, ours and torch's, each warmed up after the change of
the number of threads; torch's in the type that it multiplies fastest here. Prints the gain of each and its share of a
linear one.
"""

import statistics
import sys
from time import perf_counter

import torch

from tilewright.bench.timing import dtype_name, fastest_dtype
from tilewright.ops.linear import linear, pack_weight
from tilewright.ops.native import kernels

SHAPES = {"2B qkv": (4096, 2048), "2B gate_up": (12288, 2048), "2B down": (2048, 6144), "8B qkv": (6144, 4096)}
ROUNDS, CALLS = 5, 4


def seconds(call, threads: int) -> float:
    """The median of a few calls on `threads` threads."""
    kernels.set_num_threads(threads)
    torch.set_num_threads(threads)
    call()
    times = []
    for _ in range(CALLS):
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    most = int(sys.argv[1]) if len(sys.argv) > 1 else kernels.num_threads()
    shares: dict[str, list[float]] = {"ours": [], "torch": []}
    dtype = fastest_dtype(1024)
    print(f"{'shape':12} {'M':>5}  1 thread -> {most}: ours, torch in {dtype_name(dtype)} (share of {most} x)")
    for name, (n, k) in SHAPES.items():
        weight = torch.randn(n, k).bfloat16()
        packed, their_weight = pack_weight(weight), weight.to(dtype)
        for m in (256, 512, 1024):
            x, out = torch.randn(m, k).bfloat16(), torch.empty(m, n, dtype=torch.bfloat16)
            their_x = x.to(dtype)
            calls = {
                "ours": lambda x=x, out=out, packed=packed: linear(x, packed, out=out),
                "torch": lambda x=their_x, weight=their_weight: torch.nn.functional.linear(x, weight),
            }
            times: dict[tuple[str, int], list[float]] = {}
            for _ in range(ROUNDS):
                for threads in (1, most):
                    for who, call in calls.items():
                        times.setdefault((who, threads), []).append(seconds(call, threads))
            line = f"{name:12} {m:5}"
            for who in calls:
                one, many = (statistics.median(times[who, threads]) for threads in (1, most))
                shares[who].append(one / many / most)
                tflops = 2 * m * n * k / many / 1e12
                line += f"   {who} {one / many:5.2f} x ({one / many / most:4.0%}), {tflops:.2f} TFLOP/s"
            print(line, flush=True)
    for who, values in shares.items():
        print(f"{who}: {statistics.geometric_mean(values):.0%} of linear (geometric mean)")


if __name__ == "__main__":
    main()
