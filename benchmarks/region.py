"""What it saves to replay a step in one parallel region: python benchmarks/region.py [--formats none int8 int4]

Both ways by turns in one process: each call of a recorded step wakes and joins the threads ("calls"), or the threads
stay for the whole step ("region"; docs/threads.md). First chains of one op, in us per call, then decode steps of a
model with the sizes of a 0.7B Qwen3-VL and random weights, in ms, with the share that its bytes are of the read
bandwidth beside it. Of each, the least and the median of all turns: others on the machine only ever add.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from shapes import GREEDY, Bench, make_model

from tilewright.engine.measure import machine
from tilewright.engine.measure.costs import costs_of
from tilewright.ops.activation import silu_and_mul
from tilewright.ops.linear import linear, pack_weight
from tilewright.ops.native import kernels
from tilewright.ops.norm import rms_norm
from tilewright.ops.plan import Arena, Plan

WAYS = {"calls": False, "region": True}
CHAIN = 100  # calls of one op in a plan
PROMPT_TOKENS = 128
# The text side of the shape that docs/benchmarks.md calls 0.7B.
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def by_turns(run: Callable[[bool], float], seconds: float) -> dict[str, dict[str, float]]:
    """Least and median of what `run` gives for each way."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    until = perf_counter() + seconds
    while perf_counter() < until or len(times["region"]) < 3:
        for way, in_one_region in WAYS.items():
            times[way].append(run(in_one_region))
    return {way: {"least": min(values), "median": statistics.median(values)} for way, values in times.items()}


def chains() -> dict[str, Callable[[], Any]]:
    """One call of each op, on rows of 2,048."""
    rows = {count: torch.randn(count, 2048).bfloat16() for count in (1, 8, 64)}
    gates = torch.randn(8, 2 * 6144).bfloat16()
    weight = torch.ones(2048).bfloat16()
    square = pack_weight(torch.randn(1024, 1024).bfloat16())
    return {
        "rms_norm [1, 2048]": lambda: rms_norm(rows[1], weight, 1e-6),
        "rms_norm [8, 2048]": lambda: rms_norm(rows[8], weight, 1e-6),
        "rms_norm [64, 2048]": lambda: rms_norm(rows[64], weight, 1e-6),
        "silu_and_mul [8, 2 x 6144]": lambda: silu_and_mul(gates),
        "linear [1, 1024] x [1024, 1024], in cache": lambda: linear(rows[1][:, :1024], square),
    }


def measure_chain(call: Callable[[], Any], seconds: float) -> dict[str, dict[str, float]]:
    plan = Plan(Arena())
    with plan.record():
        for _ in range(CHAIN):
            call()

    def run(in_one_region: bool) -> float:
        began_s = perf_counter()
        plan.replay(in_one_region=in_one_region)
        return (perf_counter() - began_s) / CHAIN * 1e6

    return by_turns(run, seconds)


class Steps:
    """Sequences that decode, a step at a time, replayed one way or the other."""

    def __init__(self, model: Any, batch: int) -> None:
        self._bench = Bench(model, batch, 2048)
        core = self._bench.core
        for index in range(batch):
            core.add(str(index), self._bench.inputs(PROMPT_TOKENS), GREEDY)
        while any(not item.is_decoding for item in core.scheduler.running + core.scheduler.waiting):
            core.step()
        for _ in range(3):  # the first records
            core.step()

    def seconds(self, in_one_region: bool) -> float:
        """Of one step; the least of a few, since the first after a change finds threads asleep or busy."""
        before = Plan.replay
        Plan.replay = lambda plan: before(plan, in_one_region=in_one_region)  # type: ignore[method-assign, assignment]
        try:
            return min(self._bench.step_seconds() for _ in range(4))
        finally:
            Plan.replay = before  # type: ignore[method-assign]


def show(name: str, found: dict[str, dict[str, float]], unit: str, note: str = "") -> None:
    calls, region = found["calls"], found["region"]
    print(
        f"{name:44} calls {calls['least']:8.2f} ({calls['median']:8.2f}) {unit}   "
        f"region {region['least']:8.2f} ({region['median']:8.2f}) {unit}   "
        f"{calls['least'] / region['least']:5.2f} x ({calls['median'] / region['median']:5.2f} x) {note}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=["none", "int8", "int4"], help="of the model's products")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--seconds", type=float, default=6, help="for each line")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    results: dict[str, Any] = {"threads": kernels.num_threads()}
    print(f"{kernels.num_threads()} threads; least (median) of the turns")
    for name, call in chains().items():
        results[name] = measure_chain(call, options.seconds / 3)
        show(name, results[name], "us")
    for quantize in options.formats:
        model = make_model(CONFIG, quantize=quantize)
        step_bytes = costs_of(model, torch.bfloat16.itemsize).decode_bytes(PROMPT_TOKENS + 16)
        for batch in options.batch:
            steps = Steps(model, batch)
            read_gb_s = machine.measure(0.5).read_gb_s
            found = by_turns(lambda in_one_region, steps=steps: steps.seconds(in_one_region) * 1e3, options.seconds)
            read_gb_s = max(read_gb_s, machine.measure(0.5).read_gb_s)
            shares = {way: step_bytes / times["least"] / 1e6 / read_gb_s for way, times in found.items()}
            name = f"decode {batch}, {'bf16' if quantize == 'none' else quantize}"
            note = f"{step_bytes / 1e9:.2f} GB at {read_gb_s:.0f} GB/s: {shares['calls']:.0%} -> {shares['region']:.0%}"
            results[name] = {**found, "step_bytes": step_bytes, "read_gb_s": read_gb_s, "shares": shares}
            show(name, found, "ms", note)
        del model
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
