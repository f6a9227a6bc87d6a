"""A GPU beside the CPU: parity of every family, copies and waits of a step, and the speed of published shapes.

    python benchmarks/accelerator.py --device cuda --out DIR [--sections parity ...] [--configs DIR] [--pipelines DIR]

Leaves DIR/accelerator.json and DIR/accelerator.md. Weights are random. A section that fails, or takes longer than its
time, is reported as such, and the others go on. --configs is a folder with Qwen3-VL-8B-Instruct.json and
Z-Image-Turbo/{transformer,vae,scheduler}.json. --pipelines is a folder of small checkpoints in diffusers' layout, which
are to draw what they draw on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from accelerator_models import CONFIGS, SEEING, build, fill, make_prompt

from tilewright.engine.load.assembly import build_core
from tilewright.engine.media.transfer import MediaTransfer
from tilewright.engine.schedule.step import StepLimits
from tilewright.inputs.media_buffer import MediaBuffer
from tilewright.models.protocol import MediaBatch
from tilewright.ops import backend, platform
from tilewright.types import SamplingParams

PAGE_SIZE = 64
SMALL = {"width": 64, "height": 64}  # pixels that pipelines draw beside the CPU
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class NoText:
    def push(self, token_ids):
        return ""

    def flush(self):
        return ""


class Bench:
    """A model in an engine core, on the CPU's kernels or on the device."""

    def __init__(self, own: platform.Platform, config: dict, dtype: torch.dtype, *, made_there=False, **limits):
        self.config, self.own = config, own
        with self.computing():
            self.model = build(config)
            self.weight_bytes = fill(self.model, dtype, own.place.torch_device if made_there else None)
            patch = config["vision_config"]["patch_size"] if "vision_config" in config else 16
            self.buffer = MediaBuffer(3 * patch**2, dtype, 512 << 20)
            step_limits = StepLimits(
                **{"max_context": 4096, "max_tokens_per_step": 2048, "max_sequences": 32, **limits}
            )
            num_pages = step_limits.max_sequences * -(-step_limits.max_context // PAGE_SIZE)
            self.core = build_core(
                self.model,
                dtype,
                step_limits,
                min(num_pages, 2048),
                num_cross_pages=256,
                num_state_slots=96,
                make_token_decoder=NoText,
                media_buffer=self.buffer,
                prefix_cache=False,
                replay=own.backend == "native" or not own.place.is_host,
            )

    def computing(self):
        return backend.use(self.own.backend, self.own.place)

    def prompt(self, num_words, grids=(), seed=0):
        return make_prompt(self.config, self.buffer, self.model.num_position_axes, num_words, grids, seed)

    def answer(self, prompts, max_tokens, each_step=lambda logits: None):
        """Token ids of greedy answers; `each_step` sees the logits of every step.

        `first_s` is when all had their first token, `steps_s` when each step's tokens were there.
        """
        self.first_s, self.steps_s = None, []
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        sample = self.core.sampler.sample

        def seen(logits, step):
            each_step(logits)
            return sample(logits, step)

        self.core.sampler.sample = seen
        try:
            with self.computing():
                sequences = [item for i, prompt in enumerate(prompts) for item in self.core.add(str(i), prompt, params)]
                while self.core.has_work:
                    for failure in self.core.step().failures.values():
                        raise failure
                    self.steps_s.append(time.perf_counter())
                    if self.first_s is None and all(sequence.output_token_ids for sequence in sequences):
                        self.first_s = self.steps_s[-1]
        finally:
            self.core.sampler.sample = sample
        return [sequence.output_token_ids for sequence in sequences]


def synchronize(own):
    if not own.place.is_host and own.place.torch_device.type == "cuda":
        torch.cuda.synchronize(own.place.torch_device)


def grids_of(name, count):
    shapes = [(1, 2), (2, 2), (1, 1)] if name == "mllama" else [(8, 12), (16, 16), (6, 10)]
    return [shapes[i % 3] for i in range(count)]


def run_machine(own, options):
    found: dict[str, Any] = {"torch": torch.__version__, "device": own.device}
    if own.place.is_host:
        return found
    device = own.place.torch_device
    found["name"] = torch.cuda.get_device_name(device)
    source = torch.empty(4 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = own.place.host_bytes(256 << 20)
    for name, copy, moved in (
        ("copy_gb_per_s", lambda: target.copy_(source), 2 * len(source)),
        ("host_to_device_gb_per_s", lambda: target[: len(host)].copy_(host, non_blocking=True), len(host)),
    ):
        times = []
        for _ in range(6):
            synchronize(own)
            began = time.perf_counter()
            copy()
            synchronize(own)
            times.append(time.perf_counter() - began)
        found[name] = round(moved / min(times) / 1e9, 1)
    return found


def run_parity(own, options):
    """Logits of prompts with images and of a few decoded tokens, beside those of the CPU's kernels."""
    rows = {}
    for name, config in CONFIGS.items():
        for dtype_name, dtype in DTYPES.items():
            rows[f"{name} {dtype_name}"] = attempted(parity, own, name, config, dtype)
    return rows


def parity(own, name, config, dtype):
    found = {}
    for which, where in (("cpu", platform.resolve("cpu")), ("device", own)):
        bench = Bench(where, config, dtype)
        prompts = [bench.prompt(40, grids_of(name, 2) if name in SEEING else (), 1), bench.prompt(13, (), 2)]
        logits = []
        tokens = bench.answer(
            prompts, 5, lambda step_logits, kept=logits: kept.append(step_logits.float().cpu().clone())
        )
        found[which] = logits, tokens
    errors = []
    for ours, theirs in zip(found["cpu"][0], found["device"][0], strict=True):
        errors.append(float((ours - theirs).norm() / ours.norm()))
        if not torch.equal(ours.argmax(1), theirs.argmax(1)):
            break  # from here on the answers are of other tokens
    same = found["cpu"][1] == found["device"][1]
    return {"largest_relative_error": float(f"{max(errors):.2e}"), "steps_compared": len(errors), "same_tokens": same}


def run_counts(own, options):
    """Copies and waits between a step's schedule and its sampling, for 1, 8 and 32 images in it."""
    rows = {}
    for name in SEEING:
        bench = Bench(own, CONFIGS[name], torch.bfloat16, max_tokens_per_step=8192, max_encode_patches=1 << 16)
        for count in (1, 8, 32):
            rows[f"{name} {count}"] = attempted(counts, own, bench, name, count)
    return rows


def counts(own, bench, name, count):
    if own.place.is_host:
        return {"error": "a CPU has no copies to count"}
    core, result = bench.core, {}
    run = core.runner.run

    def counted(step):
        if not step.encode:
            return run(step)
        result["pictures"] = len(step.encode)
        synchronize(own)
        torch.cuda.set_sync_debug_mode("error" if result.get("strict") else "default")
        try:
            with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profiler:
                logits = run(step)
                torch.cuda.set_sync_debug_mode("default")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        events = profiler.events()
        names = [event.name for event in events]
        result["host_to_device"] = sum(item.startswith("Memcpy HtoD") for item in names)
        result["device_to_host"] = sum(item.startswith("Memcpy DtoH") for item in names)
        # The profiler itself waits for the device once, when it stops.
        result["waits"] = {item: names.count(item) for item in SYNCS if names.count(item)}
        result["kernels"] = sum(item == "cudaLaunchKernel" or item.startswith("cuLaunchKernel") for item in names)
        result["graphs"] = names.count("cudaGraphLaunch")
        return logits

    for turn in range(2):  # op by op, then recorded
        seed = 10 * count + 100_000 * turn
        bench.answer([bench.prompt(10, [grid], seed + i) for i, grid in enumerate(grids_of(name, count))], 2)
    core.resources.media.features.clear()
    core.runner.run = counted
    try:
        prompts = [bench.prompt(10, [grid], 1000 * count + i) for i, grid in enumerate(grids_of(name, count))]
        bench.answer(prompts, 2)
        result["strict"] = True
        prompts = [bench.prompt(10, [grid], 5000 * count + i) for i, grid in enumerate(grids_of(name, count))]
        try:
            bench.answer(prompts, 2)
            result["no_hidden_waits"] = True
        except Exception as error:
            result["no_hidden_waits"] = brief(error)
    finally:
        core.runner.run = run
    del result["strict"]
    return result


def large(own, options, **limits):
    config = json.loads((options.configs / "Qwen3-VL-8B-Instruct.json").read_text())
    return Bench(own, config, torch.bfloat16, made_there=True, **limits)


def run_decode(own, options):
    """Decode of the 8B shape: what it reads of its weights in a second, as a share of what a copy moves."""
    copied = run_machine(own, options).get("copy_gb_per_s")
    bench, rows = large(own, options, max_tokens_per_step=2048), {}
    text_bytes = sum(weight.data.nbytes for weight in packed_of(bench.model.decoder))
    for batch in (1, 8, 32):
        bench.answer([bench.prompt(128, (), seed) for seed in range(batch)], 48)
        steps = [end - begin for begin, end in itertools.pairwise(bench.steps_s)][8:]
        step_s = statistics.median(steps)
        rows[f"batch {batch}"] = {
            "step_ms": round(step_s * 1e3, 3),
            "tokens_per_s": round(batch / step_s, 1),
            "weights_gb_per_s": round(text_bytes / step_s / 1e9, 1),
            "share_of_copy": None if not copied else round(text_bytes / step_s / 1e9 / copied, 3),
        }
    graphs = len(bench.core.runner.model_runner._captured)
    return {"graphs": graphs, "text_weight_gb": round(text_bytes / 1e9, 2), "copy_gb_per_s": copied, **rows}


def packed_of(part):
    """The packed weights that a token is multiplied by."""
    from tilewright.ops.packed import Packed
    from tilewright.weights.spec import iter_weights

    return [weight.value for weight in iter_weights(part) if isinstance(weight.value, Packed)]


class BlockingTransfer(MediaTransfer):
    """A copy of each image for itself, out of memory that the device cannot read, each waited for."""

    def __init__(self, rows, device, plain):
        super().__init__(rows, device)
        # The same memory for passes that are recorded, in both variants.
        self._kept_rows, self.is_kept = plain._kept_rows, plain.is_kept

    def send_ahead(self, items):
        return False

    def send(self, items, *, ahead=False, max_kept_rows=0):
        rows = [self._rows[item.first_row : item.first_row + item.num_rows].clone() for item in items]
        there = []
        for part in rows:
            there.append(part.to(self._device.torch_device))
            if part.device != there[-1].device:
                torch.cuda.synchronize(self._device.torch_device)
        first, moved = 0, []
        for item in items:
            moved.append(item.__class__(item.kind, item.grid, item.tiling, first, item.num_rows, item.num_features))
            first += item.num_rows
        kept = self._kept_rows(first, max_kept_rows)
        return MediaBatch(torch.cat(there) if kept is None else torch.cat(there, out=kept), tuple(moved))


def run_images(own, options):
    """16 requests with an image each, at once, on the 8B shape: one copy of a step's media, or each for itself."""
    bench = large(own, options, max_tokens_per_step=8192, max_encode_patches=1 << 16, max_sequences=16)
    runner, rows = bench.core.runner.model_runner, {}
    plain = runner._media
    blocking = BlockingTransfer(bench.buffer.rows, own.place, plain)
    for side in (16, 32):
        tried: dict[str, list[tuple[float, float]]] = {"one copy": [], "blocking": []}
        for turn in range(4):
            for name, transfer in (("one copy", plain), ("blocking", blocking)):
                runner._media = transfer
                prompts = [bench.prompt(32, [(side, side)], 100 * turn + i) for i in range(16)]
                bench.core.resources.media.features.clear()
                synchronize(own)
                began = time.perf_counter()
                bench.answer(prompts, 16)
                if turn:
                    tried[name].append((bench.first_s - began, bench.steps_s[-1] - began))
        rows[f"{16 * side} x {16 * side}"] = {
            name: {
                "first_token_ms": round(min(first for first, _ in times) * 1e3, 1),
                "tokens_per_s": round(256 / min(whole for _, whole in times), 1),
            }
            for name, times in tried.items()
        }
    runner._media = plain
    times = []
    for turn in range(4):
        prompt = bench.prompt(32, [(64, 64)], 9000 + turn)
        bench.core.resources.media.features.clear()
        synchronize(own)
        began = time.perf_counter()
        bench.answer([prompt], 1)
        times.append(time.perf_counter() - began)
    rows["1024 x 1024 first token, ms"] = round(min(times[1:]) * 1e3, 1)
    return rows


def run_drawing(own, options):
    """Z-Image-Turbo: small images beside the CPU's, and seconds for one of 1024 x 1024 of the published shape."""
    from accelerator_drawing import make_pipeline

    folder, rows = options.configs / "Z-Image-Turbo", {}
    for name, dtype in DTYPES.items():
        rows[f"beside the CPU, {name}"] = attempted(drawing_parity, own, folder, dtype)
    with backend.use(own.backend, own.place):
        pipeline = make_pipeline(own, folder, torch.bfloat16, is_small=own.place.is_host)
        side = 64 if own.place.is_host else 1024
        for turn in range(3):
            params = pipeline.limits.params(f"a picture {turn}", width=side, height=side, seed=turn)
            synchronize(own)
            began = time.perf_counter()
            timings = pipeline.generate(params).timings
            rows[f"{side} x {side}, turn {turn}"] = {
                "seconds": round(time.perf_counter() - began, 3),
                "text_s": round(timings.encode_s, 3),
                "steps": params.num_steps,
                "decode_s": round(timings.decode_s, 3),
            }
    return rows


def drawing_parity(own, folder, dtype):
    from accelerator_drawing import make_pipeline

    found = []
    for where in (platform.resolve("cpu"), own):
        with backend.use(where.backend, where.place):
            pipeline = make_pipeline(where, folder, dtype, is_small=True)
            result = pipeline.generate(pipeline.limits.params("a picture", width=64, height=64, num_steps=3, seed=1))
            found.append((result.latents, result.pixels))
    return distance(*found)


def distance(ours, theirs):
    """How far apart two runs are, each its latents and its pixels, both on the host."""
    (latents, pixels), (their_latents, their_pixels) = ours, theirs
    error = (latents.float() - their_latents.float()).norm() / latents.float().norm()
    difference = (torch.from_numpy(pixels).float() - torch.from_numpy(their_pixels).float()).abs().mean()
    return {
        "latents_relative_error": float(f"{error:.2e}"),
        "pixels_mean_difference": round(float(difference), 3),
    }


def run_pipelines(own, options):
    """Small pipelines of any kind beside the CPU's: what they have drawn after three steps from the same noise."""
    rows = {}
    for folder in sorted(options.pipelines.iterdir()) if options.pipelines else []:
        for name, dtype in DTYPES.items():
            rows[f"{folder.name} {name}"] = attempted(pipeline_parity, own, folder, str(dtype).removeprefix("torch."))
    return rows


def pipeline_parity(own, folder, dtype):
    from tilewright.diffusion.diffusion import Diffusion

    found = []
    for device in ("cpu", str(own.place)):
        with Diffusion(folder, dtype=dtype, device=device, pack_cache=False) as diffusion:
            made = diffusion.generate("a picture", num_steps=3, seed=1, output="array", **SMALL)
            found.append((made.latents, made.images[0]))
    return distance(*found)


SECTIONS = {
    "machine": (run_machine, 60),
    "parity": (run_parity, 120),
    "counts": (run_counts, 100),
    "decode": (run_decode, 100),
    "pictures": (run_images, 120),
    "drawing": (run_drawing, 80),
    "pipelines": (run_pipelines, 100),
}


def attempted(measure, *arguments):
    """What it measures, or why it cannot: the other rows are measured all the same, while the section has time."""
    try:
        return measure(*arguments)
    except TimeoutError:
        raise
    except Exception as error:
        return {"error": brief(error)}


def brief(error):
    last = traceback.extract_tb(error.__traceback__)[-3:]
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(last))
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]} ({where})"


@contextlib.contextmanager
def within(seconds):
    def stop(number, frame):
        raise TimeoutError(f"took longer than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("build/accelerator"))
    parser.add_argument("--configs", type=Path, default=Path("configs"), help="folder of published configs by name")
    parser.add_argument("--pipelines", type=Path, help="folder of small checkpoints in diffusers' layout")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    own = platform.resolve(options.device, "torch")
    report: dict[str, Any] = {}
    for name in options.sections:
        run, seconds = SECTIONS[name]
        began = time.perf_counter()
        try:
            with within(seconds), torch.inference_mode():
                report[name] = run(own, options)
        except Exception as error:
            traceback.print_exc()
            report[name] = {"error": brief(error)}
        report[name]["seconds"] = round(time.perf_counter() - began, 1)
        print(f"## {name}\n{json.dumps(report[name], indent=1)}", flush=True)
        (options.out / "accelerator.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.out / "accelerator.md").write_text(as_markdown(report))
        if not own.place.is_host:
            torch.cuda.empty_cache()
    return 0


def as_markdown(report):
    lines = ["# On a GPU", ""]
    for section, rows in report.items():
        lines += [f"## {section}", "", "| | |", "| --- | --- |"]
        for name, value in rows.items():
            shown = ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else value
            lines.append(f"| {name} | {shown} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
