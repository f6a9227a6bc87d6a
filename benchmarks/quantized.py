"""What 8 and 4 bits give on this machine: python benchmarks/quantized.py [--seconds 150] [--json FILE]

Three parts, each printed as it is measured, so that a run that is cut short has told what it found:

  products  rates of one linear in bf16 and in quantised formats, in turns, the rounding of activations included
  decode    a step of a 0.7B Qwen3 with random weights in bf16, int8 and int4, and the share that its bytes are of the
            read bandwidth
  models    the sizes of Qwen3-8B and Qwen3-30B-A3B, all layers, random packed weights, in int8 and int4: decode and
            prompts, with shares of what the machine reads and multiplies

Nothing is read from disk. A part that finds its time spent says what it leaves out.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from shapes import Bench, make_model, packed, resident_gb

from tilewright.engine.measure import machine
from tilewright.engine.measure.costs import costs_of
from tilewright.host.memory import available_bytes
from tilewright.ops.linear import PackedWeight, linear
from tilewright.ops.native import kernels

# Of the products; None: bf16, which the others are compared with.
FORMATS: dict[str, tuple[str, int] | None] = {
    "bf16": None,
    "int8, whole rows": ("int8", 0),
    "int8, rotated": ("int8_rotated", 0),
    "int4, rotated": ("int4_rotated", 32),
    "int8 / 256": ("int8", 256),
    "int8 / 128": ("int8", 128),
    "int8 / 64": ("int8", 64),
    "int8 / 32": ("int8", 32),
    "uint4 / 32": ("uint4", 32),
    "int4 / 128": ("int4", 128),
    "fp8 / 128": ("fp8", 128),
}
ROWS = (1, 8, 15, 16, 64, 512, 1024)  # answers, few and many of them, and prompts
# The text side of the shape that docs/benchmarks.md calls 0.7B.
SMALL = {
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
LINEAR = (12288, 4096)  # outputs and inputs: gate or up of an 8B model
MODELS = {
    "8B": SMALL
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "30B-A3B": SMALL
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
# About what packing takes of each weight: a model that does not fit is left out.
BYTES_PER_WEIGHT = {"none": 2.0, "int8": 1.01, "int4": 0.6}
NUM_WEIGHTS = {"8B": 8.2e9, "30B-A3B": 30.5e9}


class Clock:
    """What is left of the time, and what was found."""

    def __init__(self, seconds: float, json_path: Path | None) -> None:
        self._until_s = perf_counter() + seconds
        self._json_path = json_path
        self.found: dict[str, Any] = {}

    def left_s(self) -> float:
        return self._until_s - perf_counter()

    def tell(self, key: str, value: Any, text: str) -> None:
        """Prints a line, and writes all there is so far."""
        self.found[key] = value
        print(text, flush=True)
        if self._json_path is not None:
            self._json_path.write_text(json.dumps(self.found, indent=2))


def timed(call: Callable[[], Any]) -> float:
    begin_s = perf_counter()
    call()
    return perf_counter() - begin_s


def measure_products(clock: Clock, limits: machine.MeasuredMachine, seconds: float) -> None:
    """One line for each number of rows: the rate of each format, and its ratio to bf16's in the same turns."""
    n, k = LINEAR
    block = (torch.randn(1 << 22) * 0.02).bfloat16()
    # Several of each, more than caches hold, as a model has them.
    weights: dict[str, list[PackedWeight]] = {
        name: [packed(n, k, False, False, block, format) for _ in range(2 if format is None else 4)]
        for name, format in FORMATS.items()
    }
    for rows in ROWS:
        x = torch.randn(rows, k).bfloat16()
        out = torch.empty(rows, n, dtype=x.dtype)
        times: dict[str, list[float]] = {name: [] for name in FORMATS}
        until_s = perf_counter() + seconds / len(ROWS)
        turn = 0
        while perf_counter() < until_s or turn < 3:
            for name, copies in weights.items():
                weight = copies[turn % len(copies)]
                times[name].append(timed(partial(linear, x, weight, out=out)))
            turn += 1
        plain = times["bf16"]
        figures, texts = {}, []
        for name, own in times.items():
            ratio = statistics.median(before / after for before, after in zip(plain, own, strict=True))
            rate = 2 * rows * n * k / min(own) / 1e12
            read = weights[name][0].size_bytes / min(own) / 1e9
            figures[name] = {"least_s": min(own), "median_s": statistics.median(own), "tops": rate, "gb_s": read}
            figures[name]["x_bf16"] = ratio
            shown = f"{read:.0f} GB/s" if rows == 1 else f"{rate:.2f} TOP/s"
            texts.append(f"    {name:18} {min(own) * 1e3:8.3f} ms  {shown:>12}  {ratio:5.2f} x bf16")
        peaks = f"peaks: bf16 {limits.bf16_tflops:.1f}, int8 {limits.int8_tops:.1f} TOP/s"
        head = f"linear {rows} x {k} -> {n}, {turn} turns; {peaks}, read {limits.read_gb_s:.0f} GB/s"
        clock.tell(f"linear {rows}", figures, "\n".join([head, *texts]))


def measure_small(clock: Clock, seconds: float) -> None:
    """Decode steps of the 0.7B shape, formats in turns."""
    models = {name: make_model(SMALL, quantize=name) for name in ("none", "int8", "int4")}
    for batch in (1, 8):
        steps = {name: Bench(model, batch, 2048) for name, model in models.items()}
        for own in steps.values():
            own.start_decoding(batch, 128)
        times: dict[str, list[float]] = {name: [] for name in models}
        read_gb_s = machine.measure(0.5).read_gb_s
        until_s = perf_counter() + seconds / 2
        while perf_counter() < until_s or len(times["int4"]) < 3:
            for name, own in steps.items():
                times[name].append(min(own.step_seconds() for _ in range(4)))  # threads may sleep before the first
        read_gb_s = max(read_gb_s, machine.measure(0.5).read_gb_s)
        for name, model in models.items():
            step_bytes = costs_of(model, torch.bfloat16.itemsize).decode_bytes(144)
            share = step_bytes / min(times[name]) / 1e9 / read_gb_s
            ratio = statistics.median(a / b for a, b in zip(times["none"], times[name], strict=True))
            row = {
                "least_s": min(times[name]),
                "median_s": statistics.median(times[name]),
                "step_bytes": step_bytes,
                "read_gb_s": read_gb_s,
                "share": share,
                "x_bf16": ratio,
            }
            text = (
                f"0.7B decode {batch}, {'bf16' if name == 'none' else name:5} {batch / min(times[name]):8.1f} tokens/s "
                f"({batch / row['median_s']:.1f} median), {step_bytes / 1e9:.2f} GB a step, {share:.0%} of "
                f"{read_gb_s:.0f} GB/s, {ratio:.2f} x bf16"
            )
            clock.tell(f"0.7B decode {batch} {name}", row, text)


def measure_model(clock: Clock, name: str, quantize: str, limits: machine.MeasuredMachine) -> None:
    """Decode of 1 and 8, a prompt of 1,024."""
    key = f"{name} {quantize}"
    needed = NUM_WEIGHTS[name] * BYTES_PER_WEIGHT[quantize] * 1.1 + 4e9
    if available_bytes() < needed:
        return clock.tell(key, None, f"{key}: left out, {needed / 1e9:.0f} GB of memory are not there")
    begin_s = perf_counter()
    model = make_model(MODELS[name], quantize=quantize)
    print(
        f"{key}: packed weights made in {perf_counter() - begin_s:.1f} s, {resident_gb():.1f} GB resident", flush=True
    )
    bench = Bench(model, 8, 2048)
    costs = costs_of(model, torch.bfloat16.itemsize)
    row: dict[str, float] = {"resident_gb": resident_gb()}
    for batch in (1, 8):
        bench.start_decoding(batch, 128)
        times = [bench.step_seconds() for _ in range(12)]
        bench.finish(batch)
        row[f"decode {batch} tokens/s"] = batch / statistics.median(times)
        text = f"{key}: decode {batch}: {batch / statistics.median(times):.1f} tokens/s, best {batch / min(times):.1f}"
        if batch == 1:  # of several, nobody knows how many experts they share
            read_gb_s = max(limits.read_gb_s, machine.measure(0.5).read_gb_s)
            step_bytes = costs.decode_bytes(134)
            row |= {"step_bytes": step_bytes, "read_gb_s": read_gb_s}
            row["decode 1 share"] = step_bytes / statistics.median(times) / 1e9 / read_gb_s
            text += f", {step_bytes / 1e9:.2f} GB a step, {row['decode 1 share']:.0%} of {read_gb_s:.0f} GB/s"
        clock.tell(key, row, text)
    seconds = min(bench.prefill(1024) for _ in range(2))
    rate = costs.prefill_flops(1024) / seconds / 1e12
    row |= {"prefill tokens/s": 1024 / seconds, "prefill tops": rate}
    shares = f"{rate / limits.int8_tops:.0%} of the int8 peak, {rate / limits.bf16_tflops:.2f} x the bf16 peak"
    clock.tell(key, row, f"{key}: prompt of 1,024: {1024 / seconds:.0f} tokens/s, {rate:.2f} TOP/s, {shares}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150, help="in all, about (default 150)")
    parser.add_argument("--parts", nargs="+", choices=["products", "decode", "models"], help="default: all")
    parser.add_argument("--json", type=Path, help="write the figures there as they come")
    options = parser.parse_args()
    clock = Clock(options.seconds, options.json)
    parts = options.parts or ["products", "decode", "models"]
    limits = machine.measure(1.5)
    clock.tell(
        "machine",
        {**vars(limits), "threads": kernels.num_threads(), "isa": kernels.active_isa()},
        f"{kernels.num_threads()} threads, {kernels.active_isa()}; read {limits.read_gb_s:.0f} GB/s, "
        f"bf16 {limits.bf16_tflops:.1f}, int8 {limits.int8_tops:.1f}, fp32 {limits.fp32_tflops:.1f} TOP/s",
    )
    if "products" in parts:
        measure_products(clock, limits, options.seconds * 0.15)
    if "decode" in parts:
        measure_small(clock, options.seconds * 0.12)
    if "models" in parts:
        for name, quantize in [("8B", "int8"), ("8B", "int4"), ("30B-A3B", "int4"), ("30B-A3B", "int8")]:
            if clock.left_s() <= 0:
                clock.tell(f"{name} {quantize}", None, f"{name} {quantize}: left out, the time is spent")
                continue
            measure_model(clock, name, quantize, limits)
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    clock.tell("peak_gb", peak_gb, f"most memory that was held: {peak_gb:.1f} GB")


if __name__ == "__main__":
    main()
