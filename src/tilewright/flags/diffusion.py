"""The options of `Diffusion` and of its requests as flags, for the commands that make images and videos.

Imports the pipelines only to open one.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from tilewright.diffusion.options import DiffusionOptions
from tilewright.flags.engine import add_model_argument, check_file
from tilewright.flags.options import add_options, given_options, positive
from tilewright.host import files
from tilewright.host.files import CheckpointError
from tilewright.host.memory import explained_shortage, require_start
from tilewright.inputs.media import MediaLimits
from tilewright.types import RequestError, UnsupportedConfig
from tilewright.weights import embedded, hub

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    from tilewright.diffusion.diffusion import Diffusion, Generated
    from tilewright.diffusion.params import GenerationParams


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a request for images or videos."""
    parser.add_argument("--size", type=_size, metavar="WxH", help="in pixels, such as 1024x768 (default: the model's)")
    parser.add_argument("--width", type=positive, metavar="N", help="width and height, instead of --size")
    parser.add_argument("--height", type=positive, metavar="N")
    parser.add_argument("--steps", type=positive, metavar="N", help="denoising steps")
    parser.add_argument("--guidance", type=float, metavar="G", help="strength of the prompt; 0: no guidance")
    parser.add_argument("--negative", metavar="TEXT", help="what the image should not show")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed makes the same image")
    parser.add_argument("--image", metavar="FILE", help="an image to start from, for models that support it")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add -m and the flags of how the model runs."""
    text = "a folder in diffusers' layout or a hub id"
    if embedded.has("tiny_draw"):
        text += f" (default: the embedded {embedded.DRAWING_NAME})"
    add_model_argument(parser, text)
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress, no times, no notices")
    group = parser.add_argument_group("model")
    add_options(group, DiffusionOptions)
    text = "skip blocks in steps that change less than this: faster, other images (default 0: none; try 0.1)"
    group.add_argument("--step-cache", type=float, metavar="T", help=text)
    text = "guide only this part of the denoising, such as 0-0.8: faster (default: all of it)"
    group.add_argument("--guidance-interval", type=_interval, metavar="A-B", help=text)


def check_files(options: argparse.Namespace) -> None:
    """Raise RequestError for a missing model or image, before torch is imported."""
    if options.image is not None:
        check_file("--image", options.image)
    check_pipeline(options.model)


def check_pipeline(model: str | None) -> None:
    """Raise RequestError for a missing model."""
    if model is not None and hub.find(model, "a folder or a hub id") is None:
        hub.check(model, "model_index.json")


def read_prompt(given: str) -> str:
    """Return the prompt, from standard input if it is -; an empty one is a RequestError."""
    prompt = files.read_standard_input() if given == "-" else given
    if not files.check_text(prompt, "the prompt"):
        raise RequestError("the prompt is empty, expected some text")
    return prompt


def open_model(options: argparse.Namespace) -> Diffusion:
    """Open the model of the flags; raise RequestError if it cannot be loaded."""
    given = given_options(DiffusionOptions, options)
    require_start(_name(options))
    try:
        with explained_shortage(_name(options)):
            from tilewright.diffusion.diffusion import Diffusion

            return Diffusion(options.model, progress=sys.stderr.isatty() and not options.quiet, **given)
    except (CheckpointError, UnsupportedConfig, FileNotFoundError) as error:
        raise RequestError(str(error)) from error


def _name(options: argparse.Namespace) -> str:
    return embedded.DRAWING_NAME if options.model is None else embedded.name_of(options.model)


def request(model: Diffusion, prompt: str, options: argparse.Namespace, **more: Any) -> GenerationParams:
    """Return the request of the flags, checked by the model."""
    if options.size and (options.width or options.height):
        raise RequestError("--size sets width and height, expected no --width and --height with it")
    width, height = options.size or (options.width, options.height)
    return model.params(
        prompt,
        width=width,
        height=height,
        num_steps=options.steps,
        guidance=options.guidance,
        negative_prompt=options.negative,
        seed=options.seed,
        image=None if options.image is None else read_image(options.image, f"--image {options.image}"),
        step_cache=options.step_cache,
        guidance_interval=options.guidance_interval,
        **more,
    )


def generate(model: Diffusion, params: GenerationParams, *, quiet: bool) -> Generated:
    """Run the request. Unless `quiet`, print its settings, the expected time and the progress to standard error.

    The expected time is estimated from earlier runs or from the operations, and again after the first step.
    """
    if quiet:
        return _run(model, params, None)
    what = f"{params.width} x {params.height}" + (f" x {params.num_frames} frames" if params.num_frames > 1 else "")
    count = f"{params.n} of " if params.n > 1 else ""
    print(f"{model.name}: {count}{what}, {params.num_steps} steps, seed {params.seed}", file=sys.stderr)
    expected = model.expected(params)
    print(f"about {_duration(expected.seconds)}, {expected.basis}", file=sys.stderr)
    bar: tqdm | None = None

    def on_step(step: int, num_steps: int, latents: object) -> None:
        nonlocal bar
        if bar is None:
            first_s = model.pipeline.timings.steps_s[0]
            rest_s = first_s * (num_steps - 1)
            print(f"a step takes {_duration(first_s)}: about {_duration(rest_s)} more", file=sys.stderr)
            bar = tqdm(total=num_steps, unit="step", file=sys.stderr, disable=None, leave=False)
        bar.update()

    try:
        return _run(model, params, on_step)
    finally:
        if bar is not None:
            bar.close()


def write_files(output: Path, made: Generated, encode: Callable[[np.ndarray, dict[str, Any]], bytes]) -> None:
    """Write each result as the file `encode(pixels, settings)` and print its name, numbered if there are several.

    Pixels are uint8 [T, H, W, 3].
    """
    for i, pixels in enumerate(made.images):
        path = output if len(made.images) == 1 else output.with_stem(f"{output.stem}-{i + 1}")
        files.write_bytes(path, encode(pixels, made.settings_of(i)))
        print(path)


def print_times(made: Generated) -> None:
    times = made.timings
    print(
        f"{times.total_s:.1f} s: loading {times.load_s:.1f}, prompt {times.encode_s:.1f}, "
        f"denoising {times.denoise_s:.1f}, decoding {times.decode_s:.1f}",
        file=sys.stderr,
    )


def _run(model: Diffusion, params: GenerationParams, on_step: Any) -> Generated:
    try:
        with explained_shortage(model.name):
            return model.run(params, on_step)
    except (CheckpointError, UnsupportedConfig) as error:  # of a component, which is loaded on first use
        raise RequestError(str(error)) from error


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def read_image(file: str | Path, name: str) -> Image.Image:
    """Return the image in a user's file, upright and over white as models see it; errors contain `name`."""
    from PIL import Image

    from tilewright.inputs.image import read_image as read

    limits = MediaLimits()
    try:
        data = files.read_bytes(Path(file).expanduser(), limits.max_bytes)
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror or error}") from error
    return Image.fromarray(read(data, name, limits).decode())


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\s*[xX*]\s*(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, expected one such as 1024x768")
    return int(match[1]), int(match[2])


def _interval(text: str) -> tuple[float, float]:
    match = re.fullmatch(r"(\d*\.?\d+)\s*-\s*(\d*\.?\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not an interval, expected one such as 0-0.8")
    return float(match[1]), float(match[2])
