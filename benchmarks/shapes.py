"""A model of a real config with random weights, as fast as it goes: python benchmarks/shapes.py CONFIG.json [...]

Needs no checkpoint: weights are random bits in the packed layout, so that an 8B model is ready in seconds. Steps go
through the scheduler, the runner and the sampler as always. Beside each figure stands the share of what the machine
reads per second, or of a matrix product of torch's, both measured between the rounds.

  python benchmarks/shapes.py Qwen3-VL-8B-Instruct.json
  python benchmarks/shapes.py Qwen3-VL-30B-A3B-Instruct.json --batch 1 8 --rounds 5 --json 30b.json
  python benchmarks/shapes.py Llama-3.2-11B-Vision-Instruct.json
  python benchmarks/shapes.py Qwen3.5-4B.json Qwen3.5-9B.json
  python benchmarks/shapes.py Qwen3-VL-8B-Instruct.json --tp 2
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from tilewright.bench.timing import probe
from tilewright.engine.kv.pages import PAGE_SIZE
from tilewright.engine.load.assembly import build_core
from tilewright.engine.measure.costs import Costs, costs_of
from tilewright.engine.ranks.ranks import EngineRanks
from tilewright.engine.ranks.worker import run_rank
from tilewright.engine.schedule.scheduler import StepLimits
from tilewright.host.binding import binding_of_ranks
from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.layers import partition, precision
from tilewright.layers.partition import Partition
from tilewright.models.registry import family_of
from tilewright.ops.linear import PackedWeight
from tilewright.ops.moe import PackedExperts
from tilewright.ops.native import apply_binding, kernels, release_binding
from tilewright.ops.packed import PackedForm, weight_format
from tilewright.parallel.group import Group, SingleGroup
from tilewright.process.frames import Channel
from tilewright.types import Medium, ModelInputs, Region, SamplingParams, Span
from tilewright.weights.conv import Unpacked
from tilewright.weights.linear import ExpertsWeight, LinearWeight, PatchWeight, PatchWeights
from tilewright.weights.spec import Weight, iter_weights

NO_ROWS = Region(0, 0)  # until `Bench.written`
GREEDY = SamplingParams(temperature=0.0, max_tokens=10**6, ignore_eos=True)


class NoText:
    """A decoder for tokens nobody reads."""

    def push(self, token_ids: list[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


def fill(tensor: torch.Tensor, block: torch.Tensor) -> None:
    """Repeats the block over the tensor: random enough for caches and multipliers, and as fast as memory."""
    flat = tensor.view(-1)
    for begin in range(0, flat.numel(), block.numel()):
        part = flat[begin : begin + block.numel()]
        part.copy_(block[: part.numel()])


def fill_scales(scales: torch.Tensor) -> None:
    """Those that are kept as bytes, with steps behind them, as 7e-4."""
    scales.fill_(1e-3 if scales.is_floating_point() else 0x3A)


def packed(
    n: int, k: int, gated: bool, bias: bool, block: torch.Tensor, quantized_as: tuple[str, int] | None = None
) -> PackedWeight:
    own = weight_format(torch.bfloat16) if quantized_as is None else weight_format(*quantized_as)
    form = PackedForm(own, n, k, gated)
    data, scales = form.allocate()
    fill(data, block.view(data.dtype))
    if scales is not None:
        fill_scales(scales)
    padded = replace(form, format=weight_format(torch.float32), k=1).num_elements // 32
    return PackedWeight(data, form, scales, torch.bfloat16, bias=torch.zeros(padded) if bias else None)


def random_value(weight: Weight, block: torch.Tensor) -> Any:
    sources = weight.sources
    if isinstance(weight, Unpacked):
        value = torch.empty(sources[0].own_shape, dtype=torch.float32 if weight.in_fp32 else torch.bfloat16)
        fill(value, block)
        return value + 1 if value.dim() == 1 else value
    if isinstance(weight, LinearWeight):
        rows = sum(source.own_shape[0] for source in sources[: weight.num_parts])
        return packed(rows, sources[0].own_shape[1], weight.gated, weight.has_bias, block, weight.quantized_as)
    if isinstance(weight, PatchWeight):
        width, channels, frames, height, _ = sources[0].own_shape
        pixels = channels * height * height
        return PatchWeights(
            packed(width, pixels, False, True, block), packed(width, frames * pixels, False, True, block)
        )
    if isinstance(weight, ExpertsWeight):
        gated = weight.num_parts == 2
        own = torch.bfloat16 if weight.quantized_as is None else weight_format(*weight.quantized_as)
        value = PackedExperts.empty(weight.num_experts, weight.rows, weight.columns, gated, own)
        fill(value.data, block.view(value.data.dtype))
        if value.scales is not None:
            fill_scales(value.scales)
        return value
    tensors = [torch.empty(source.shape, dtype=torch.bfloat16) for source in sources]
    for tensor in tensors:
        fill(tensor, block)
    weight.build(tensors, torch.bfloat16)  # what a family puts together itself, and is small
    return weight.value


def biases_of(config: dict) -> dict[str, tuple[int, ...]]:
    """A name and shape beside each weight's: families that look in a checkpoint for a bias find one there."""
    weights = iter_weights(family_of(config).build(config, {}))
    sources = [source for weight in weights for source in weight.sources if source.name.endswith(".weight")]
    return {source.name.removesuffix("weight") + "bias": source.shape[:1] for source in sources}


def make_model(config: dict, group: Group | None = None, quantize: str | None = None) -> Any:
    """The model, or what a rank of a group has of it, its products in the format that `quantize` names."""
    biases = biases_of(config)
    formats = precision.named(quantize)
    with partition.use(Partition(group or SingleGroup(), formats.block)) as parts, precision.use(formats):
        model = family_of(config).build(config, biases)
    parts.warn()
    block = (torch.randn(1 << 22) * 0.02).bfloat16()
    for weight in iter_weights(model):
        weight.restore(random_value(weight, block))
    return model


def load_rank(arguments: dict[str, Any], group: Group) -> tuple[Any, torch.dtype]:
    return make_model(arguments["config"], group), torch.bfloat16


def rank_main(channel: Channel, rank: int, size: int, payload: dict[str, Any], fds: list[int]) -> None:
    """The entry point of the other ranks' processes."""
    run_rank(channel, rank, size, payload, load_rank)


@contextlib.contextmanager
def started(config: dict, tp: int) -> Iterator[EngineRanks | None]:
    """The other ranks, each with its part of the model; this process is bound as the first of them."""
    if tp == 1:
        yield None
        return
    bindings = binding_of_ranks(tp)
    assert bindings is not None
    apply_binding(bindings[0])
    ranks = EngineRanks(tp, {"config": config}, bindings, entry="shapes:rank_main")
    try:
        yield ranks
    finally:
        ranks.close()
        release_binding()


class Bench:
    def __init__(self, model: Any, max_sequences: int, max_context: int, ranks: EngineRanks | None = None) -> None:
        self.model = model
        limits = StepLimits(max_context=max_context)
        num_pages = -(-max_context // PAGE_SIZE) * max_sequences
        vision = getattr(model, "vision", None)
        self.buffer = MediaBuffer(3 * vision.config.patch_size**2, torch.bfloat16) if vision else None
        self.core = build_core(
            model,
            torch.bfloat16,
            limits,
            num_pages,
            num_cross_pages=self.pages_per_image * (max_sequences + 1),
            num_state_slots=2 * max_sequences,  # half of them for those that run
            make_token_decoder=NoText,
            media_buffer=self.buffer,
            prefix_cache=False,
            ranks=ranks,
        )
        self.core.resources.media.features.max_bytes = 1 << 40  # none is to be encoded again in a round
        self.rng = np.random.default_rng(0)

    @property
    def pages_per_image(self) -> int:
        return -(-self.model.cross_spec.max_states // PAGE_SIZE) if self.model.cross_spec else 0

    def inputs(self, num_tokens: int) -> ModelInputs:
        ids = tuple(self.rng.integers(0, min(self.model.vocab_size, 40000), num_tokens).tolist())
        positions = np.broadcast_to(np.arange(num_tokens), (self.model.num_position_axes, num_tokens))
        return ModelInputs(ids, positions.astype(np.int64), num_tokens)

    def start_decoding(self, batch: int, prompt_tokens: int, medium: Medium | None = None) -> None:
        """Add sequences and compute their prompts; each looks at `medium` as if it was one of its own."""
        for index in range(batch):
            inputs = self.inputs(prompt_tokens)
            if medium is not None:
                own = replace(medium, key=index.to_bytes(16, "little"))
                self.keep(own, self.states)
                inputs = replace(inputs, media=(own,))
            self.core.add(str(index), inputs, GREEDY)
        while any(not item.is_decoding for item in self.core.scheduler.running + self.core.scheduler.waiting):
            self.core.step()
        for _ in range(2):  # the first records
            self.core.step()

    def decode(self, batch: int, prompt_tokens: int, steps: int, medium: Medium | None = None) -> float:
        """Seconds per step."""
        self.start_decoding(batch, prompt_tokens, medium)
        times = [self.step_seconds() for _ in range(steps)]
        self.finish(batch)
        return statistics.median(times)

    def written(self, medium: Medium, pixels: torch.Tensor) -> Medium:
        """The medium with its patches in the buffer."""
        assert self.buffer is not None
        self.allocation = self.buffer.allocate([len(pixels)])
        assert self.allocation is not None
        (region,) = self.allocation.regions
        self.buffer.view(region).copy_(pixels)
        return replace(medium, region=region)

    def prefill(self, prompt_tokens: int, media: tuple[Medium, ...] = ()) -> float:
        self.core.add("0", replace(self.inputs(prompt_tokens), media=media), GREEDY)
        begin = perf_counter()
        while not self.core.step().deltas:
            pass
        seconds = perf_counter() - begin
        self.finish(1)
        return seconds

    def keep(self, medium: Medium, features: torch.Tensor) -> None:
        """As if the medium was encoded."""
        cache = self.core.resources.media.features
        self.core.runner.model_runner.features[cache.id_of(medium.key)] = features
        cache.put(medium.key, features.nbytes)

    def forget(self) -> None:
        """Drops all that is kept of images."""
        self.core.resources.media.features.clear()
        self.core.resources.media.cross_cache.clear()

    def encode(self, medium: Medium) -> float:
        begin = perf_counter()
        self.core.runner.encode([medium])
        seconds = perf_counter() - begin
        self.states = self.core.runner.model_runner.features[self.core.resources.media.features.id_of(medium.key)]
        self.forget()
        return seconds

    def step_seconds(self) -> float:
        begin = perf_counter()
        self.core.step()
        return perf_counter() - begin

    def finish(self, batch: int) -> None:
        for index in range(batch):
            self.core.abort(str(index))


def image(bench: Bench, side: int) -> Medium:
    vision = bench.model.vision.config
    patches = side // vision.patch_size
    pixels = torch.randn(patches**2, 3 * vision.patch_size**2).bfloat16()
    span = Span(4, patches**2 // vision.merge_size**2)
    medium = Medium("image", b"0123456789abcdef", (1, patches, patches), (span,), NO_ROWS, patches**2)
    return bench.written(medium, pixels)


def tiled_image(bench: Bench) -> Medium:
    """As many tiles as there may be, in a square, which text attends to from the first token on."""
    vision = bench.model.vision.config
    side = vision.tile_size // vision.patch_size
    rows = round(vision.max_tiles**0.5)
    tiling = (rows, vision.max_tiles // rows)
    num_tiles = tiling[0] * tiling[1]
    pixels = torch.randn(num_tiles * side**2, 3 * vision.patch_size**2).bfloat16()
    medium = Medium(
        "image",
        b"0123456789abcdef",
        (num_tiles, side, side),
        (Span(0, 1),),
        NO_ROWS,
        encoder_rows=vision.max_tiles * side**2,
        num_states=num_tiles * vision.rows_per_tile,
        tiling=tiling,
    )
    return bench.written(medium, pixels)


def measure_tiled(bench: Bench, batches: list[int], costs: Costs) -> dict[str, float]:
    """Of a model with cross-attention: an image, another question about it, and decoding while it is looked at."""
    medium = tiled_image(bench)
    row = {"image, 4 tiles: encoder s": bench.encode(medium)}
    row["image, 4 tiles: first token s"] = bench.prefill(24, (medium,))
    row["image, 4 tiles: another question s"] = bench.prefill(24, (medium,))
    for batch in batches:
        seconds = bench.decode(batch, 128, 12, medium)
        row[f"decode {batch}, each with an image: tokens/s"] = batch / seconds
        if batch == 1:
            row["decode 1, with an image: GB/s"] = costs.decode_bytes(134, medium.num_states) / seconds / 1e9
    bench.forget()
    return row


def measure(model: Any, batches: list[int], rounds: int, ranks: EngineRanks | None = None) -> dict[str, Any]:
    bench = Bench(model, max(batches), 2048, ranks)
    costs = costs_of(model, torch.bfloat16.itemsize)
    vision = getattr(model, "vision", None)
    figures: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    for number in range(rounds + 1):
        limits = probe()
        row: dict[str, float] = {
            "read GB/s, best pass": limits.read_gb_s,
            "read GB/s, median pass": limits.read_gb_s_median,
            f"torch {limits.gemm_dtype} 2048x4096x4096 TFLOP/s": limits.gemm_tflops,
            "bf16 multiply peak TFLOP/s": limits.peak_tflops,
        }
        for batch in batches:
            seconds = bench.decode(batch, 128, 12)
            row[f"decode {batch}: tokens/s"] = batch / seconds
            if batch == 1:  # of several, nobody knows how many experts they share
                row["decode 1: GB/s"] = costs.decode_bytes(134) / seconds / 1e9
                row["decode 1: share of best pass"] = row["decode 1: GB/s"] / limits.read_gb_s
        seconds = bench.prefill(1024)
        rate = costs.prefill_flops(1024) / seconds / 1e12
        row["prefill 1024: tokens/s"], row["prefill 1024: TFLOP/s"] = 1024 / seconds, rate
        row["prefill 1024: share of torch's product"] = rate / limits.gemm_tflops
        if model.cross_spec:
            row |= measure_tiled(bench, batches, costs)
        elif vision:
            medium = image(bench, 1024)
            row["image 1024x1024: encoder s"] = bench.encode(medium)
            row["image 1024x1024: first token s"] = bench.prefill(medium.num_features + 24, (medium,))
            bench.forget()
        if number:  # the first round records plans and warms up
            for name, value in row.items():
                note(name, value)
    return {name: {"median": statistics.median(v), "min": min(v), "max": max(v)} for name, v in figures.items()}


def resident_gb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", type=Path, help="config.json files")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], help="sequences decoding at once (default 1 8)")
    parser.add_argument("--tp", type=int, default=1, help="ranks; probes and shares are then those of the first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    results = {}
    for path in options.configs:
        config = json.loads(path.read_text())
        with started(config, options.tp) as ranks:
            model = make_model(config, ranks.group if ranks else None)
            if ranks:
                ranks.wait_until_loaded()
            results[path.stem] = figures = measure(model, options.batch, options.rounds, ranks)
            of_rank = f"rank 0 of {options.tp}, " if ranks else ""
            print(f"{path.stem}: {of_rank}{kernels.num_threads()} threads, {resident_gb():.1f} GB resident")
            for name, value in figures.items():
                print(f"  {name:40} {value['median']:9.3f}   ({value['min']:.3f} to {value['max']:.3f})")
            del model
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
