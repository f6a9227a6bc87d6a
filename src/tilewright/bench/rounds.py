"""The four benchmarks of a model, in rounds, and their rounds as a table, JSON and a plot.

Every round has new prompts, so that caches have no effect.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image

from tilewright.bench import report
from tilewright.bench.report import aligned, write_document
from tilewright.bench.timing import Probe, median
from tilewright.engine.engine import Engine
from tilewright.engine.measure.costs import Costs
from tilewright.models.protocol import MediaBatch
from tilewright.types import Completion, RequestError


@dataclass(frozen=True)
class Measurement:
    """A number with its unit. `limited_by` is the field of Probe that limits it, if any."""

    value: float
    unit: str
    limited_by: str = ""


Amounts = dict[str, Measurement]
Measure = Callable[[int], Amounts]


@dataclass(frozen=True)
class Round:
    """The measurements of one round, and the machine's speed during it."""

    amounts: Amounts
    probe: Probe

    @classmethod
    def of(cls, amounts: Amounts, probe: Probe) -> Round:
        """Return the round, with the share of the machine's limit for each rate that has one."""
        with_shares: Amounts = {}
        for name, amount in amounts.items():
            with_shares[name] = amount
            if amount.limited_by:
                share = amount.value / getattr(probe, amount.limited_by)
                with_shares[f"{name}, of {amount.limited_by}"] = Measurement(100 * share, "%")
        return cls(with_shares, probe)


def costs(engine: Engine) -> Costs:
    return engine.costs()


class Prompts:
    """Makes prompts and images that differ in every round, so that no cache has them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.image_token_ids = engine.loaded.processor.image_token_ids
        vocabulary_size = engine.loaded.model.vocab_size
        # Special tokens are at the beginning or the end of a vocabulary.
        self.id_range = vocabulary_size // 8, vocabulary_size * 7 // 8

    def ids(self, count: int, *seed: int) -> list[int]:
        return np.random.default_rng(seed).integers(*self.id_range, count).tolist()

    def ids_with_image(self, count: int, *seed: int) -> list[int]:
        if not self.image_token_ids:
            raise RequestError(f"{self.engine.loaded.name} accepts text only, expected a model that accepts images")
        return [*self.image_token_ids, *self.ids(count, *seed)]

    def image(self, size: tuple[int, int], *seed: int) -> Image.Image:
        """Return an image of gradients with noise."""
        width, height = size
        random = np.random.default_rng(seed)
        corners = random.uniform(0, 255, (2, 2, 3)).astype(np.uint8)
        smooth = np.asarray(Image.fromarray(corners).resize(size, Image.Resampling.BICUBIC), dtype=np.float32)
        return Image.fromarray((smooth + random.normal(0, 10, (height, width, 3))).clip(0, 255).astype(np.uint8))

    def answers(self, prompts: list[list[int]], new_tokens: int, images: list[Any] | None = None) -> list[Completion]:
        """Generate the answers to all prompts at once, each of exactly `new_tokens` tokens."""
        return self.engine.generate(
            prompt_token_ids=prompts,
            images=[[image] for image in images or ()],
            max_tokens=new_tokens,
            temperature=0.0,
            ignore_eos=True,
        )


def decode(engine: Engine, options: argparse.Namespace) -> Measure:
    """Measure tokens per second after the first, and the bytes of weights, keys and values that are read."""
    prompts, costs_of_model = Prompts(engine), costs(engine)
    num_steps = options.new_tokens - 1
    bytes_per_step = costs_of_model.decode_bytes(options.prompt_tokens + options.new_tokens // 2)

    def measure(number: int) -> Amounts:
        (answer,) = prompts.answers([prompts.ids(options.prompt_tokens, number)], options.new_tokens)
        seconds = answer.timings.total_s - answer.timings.first_token_s
        return {
            "decode": Measurement(num_steps / seconds, "tokens/s"),
            "read": Measurement(num_steps * bytes_per_step / seconds / 1e9, "GB/s", "read_gb_s"),
            "read per token": Measurement(bytes_per_step / 1e9, "GB"),
            "first token": Measurement(answer.timings.first_token_s, "s"),
        }

    return measure


def prefill(engine: Engine, options: argparse.Namespace) -> Measure:
    """Measure prompt tokens per second up to the first token. The share counts linear layers only, like the probe."""
    prompts, costs_of_model = Prompts(engine), costs(engine)
    num_tokens = options.prompt_tokens
    linear_flops = costs_of_model.prefill_flops(num_tokens)
    all_flops = linear_flops + costs_of_model.attention_flops(num_tokens)

    def measure(number: int) -> Amounts:
        (answer,) = prompts.answers([prompts.ids(num_tokens, number)], 1)
        seconds = answer.timings.first_token_s
        return {
            "prefill": Measurement(num_tokens / seconds, "tokens/s"),
            "linears": Measurement(linear_flops / seconds / 1e12, "TFLOP/s", "gemm_tflops"),
            "with attention": Measurement(all_flops / seconds / 1e12, "TFLOP/s"),
        }

    return measure


def image_question(engine: Engine, options: argparse.Namespace) -> Measure:
    """Measure seconds to the first token. Preprocessing and vision are timed separately; prefill is the rest."""
    prompts = Prompts(engine)
    prompts.ids_with_image(1, 0)  # fails at once if the model accepts no images
    loaded, count = engine.loaded, options.prompt_tokens
    buffer = loaded.processor.media_buffer
    assert buffer is not None, "a model that accepts images has a buffer for them"

    @torch.inference_mode()
    def parts(number: int) -> tuple[float, float]:
        image, ids = prompts.image(options.size, number, 1), prompts.ids_with_image(count, number, 1)
        begin = perf_counter()
        inputs = loaded.processor.prompt(token_ids=ids, media=[{"type": "image", "image": image}])
        prepared = perf_counter()
        loaded.model.encode(MediaBatch.of(buffer.rows, inputs.media))
        return prepared - begin, perf_counter() - prepared

    def measure(number: int) -> Amounts:
        image, ids = prompts.image(options.size, number, 0), prompts.ids_with_image(count, number, 0)
        (answer,) = prompts.answers([ids], 1, [image])
        first_token_s = answer.timings.first_token_s
        preprocess_s, vision_s = parts(number)
        return {
            "first token": Measurement(first_token_s, "s"),
            "preprocess": Measurement(preprocess_s, "s"),
            "vision": Measurement(vision_s, "s"),
            "prefill": Measurement(first_token_s - preprocess_s - vision_s, "s"),
            "prompt": Measurement(answer.num_prompt_tokens, "tokens"),
        }

    return measure


def batch(engine: Engine, options: argparse.Namespace) -> Measure:
    """Measure seconds of many requests at once, with images if the model accepts them; then of the same again."""
    prompts = Prompts(engine)
    num_tokens = options.batch * options.new_tokens

    def measure(number: int) -> Amounts:
        each = range(options.batch)
        images = None
        if prompts.image_token_ids:
            images = [prompts.image(options.size, number, i) for i in each]
            ids = [prompts.ids_with_image(options.prompt_tokens, number, i) for i in each]
        else:
            ids = [prompts.ids(options.prompt_tokens, number, i) for i in each]
        times_s = []
        for _ in range(2):
            begin = perf_counter()
            answers = prompts.answers(ids, options.new_tokens, images)
            times_s.append(perf_counter() - begin)
        return {
            "all answers": Measurement(times_s[0], "s"),
            "tokens": Measurement(num_tokens / times_s[0], "tokens/s"),
            "again": Measurement(times_s[1], "s"),
            "again, tokens": Measurement(num_tokens / times_s[1], "tokens/s"),
            "again, cached": Measurement(sum(answer.num_cached_tokens for answer in answers), "tokens"),
        }

    return measure


MEASURES: dict[str, Callable[[Engine, argparse.Namespace], Measure]] = {
    "decode": decode,
    "prefill": prefill,
    "picture": image_question,
    "batch": batch,
}


def summary(rounds: Sequence[Round]) -> dict[str, dict[str, object]]:
    """Return median, minimum and maximum of each value over the rounds."""
    found: dict[str, dict[str, object]] = {}
    for name, amount in rounds[0].amounts.items():
        values = [one.amounts[name].value for one in rounds]
        found[name] = {
            "unit": amount.unit,
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
        }
    return found


def limits(rounds: Sequence[Round]) -> Probe:
    return median([one.probe for one in rounds])


def as_table(rounds: Sequence[Round]) -> str:
    """Return the values as a table, with the machine's speed during the rounds."""
    lines = [("", "median", "min", "max", "unit")]
    for name, entry in summary(rounds).items():
        numbers = (f"{entry[key]:.4g}" for key in ("median", "min", "max"))
        lines.append((name, *numbers, str(entry["unit"])))  # type: ignore[arg-type]
    machine = limits(rounds)
    return "\n".join(
        [
            *aligned(lines, left=(0, 4)),
            "",
            f"the machine between the rounds, medians: read {machine.read_gb_s:.1f} GB/s "
            f"at best, {machine.read_gb_s_median:.1f} typically, "
            f"matrix product {machine.gemm_tflops:.2f} TFLOP/s ({machine.gemm_dtype}), "
            f"multiply peak {machine.peak_tflops:.2f} TFLOP/s",
        ]
    )


def write_json(path: Path, rounds: Sequence[Round], about: dict[str, object]) -> None:
    """Write the measurements, the machine's limits and `about`."""
    document = {
        "figures": summary(rounds),
        "limits": asdict(limits(rounds)),
        "rounds": [asdict(one) for one in rounds],
    }
    write_document(path, about | document)


def write_plot(path: Path, rounds: Sequence[Round], title: str) -> None:
    """Plot a panel for each value: its rounds as dots, their median as a line."""
    from matplotlib.figure import Figure  # imported here: only plots need it

    entries = summary(rounds)
    figure = Figure(figsize=(3.4 * len(entries), 3.6), layout="constrained")
    for axes, (name, entry) in zip(figure.subplots(1, len(entries), squeeze=False)[0], entries.items(), strict=True):
        values = [one.amounts[name].value for one in rounds]
        axes.plot(range(1, len(values) + 1), values, "o")
        axes.axhline(entry["median"], color="black", linewidth=1)
        axes.set(title=name, xlabel="round", ylabel=entry["unit"])
        axes.set_ylim(bottom=0)
        axes.grid(True, alpha=0.3)
    figure.suptitle(title)
    report.save_figure(path, figure)
