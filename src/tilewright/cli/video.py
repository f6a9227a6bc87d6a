"""`tilewright video`: videos from words, or from words and a first frame."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.flags import diffusion
from tilewright.flags.options import positive
from tilewright.host import files
from tilewright.types import RequestError

if TYPE_CHECKING:
    from tilewright.diffusion.params import Limits


def add_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `video`."""
    parser = commands.add_parser(
        "video",
        help="make a video from words",
        description="Makes a video of PROMPT and prints the name of its file: an MP4, or an animated image, by "
        "the suffix. A model must be named: the embedded one makes only stills.",
        epilog="""examples:
  tilewright video "a cat walks in the rain" -m ./Wan2.1-T2V-1.3B-Diffusers -o cat.mp4
  tilewright video "a cat walks" -m MODEL --size 832x480 --seconds 2 --steps 30 --seed 7
  tilewright video "she turns to us" -m ./Wan2.2-TI2V-5B-Diffusers --image mine.png -o turn.mp4    an image of yours
  tilewright video "a cat walks" -m MODEL --frames 17 -o cat.webp         an animated image
  tilewright video "a cat walks" -m MODEL --low-memory                    one network in memory at a time""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", metavar="PROMPT", help="what to show; -: read it from standard input")
    text = ".mp4, or .webp, .png and .gif for an animated image (default video.mp4)"
    parser.add_argument("-o", "--output", default="video.mp4", metavar="FILE", help=text)
    parser.add_argument("--frames", type=positive, metavar="N", help="number of frames (default: the model's)")
    parser.add_argument("--seconds", type=float, metavar="S", help="the length in seconds, instead of --frames")
    parser.add_argument("--fps", type=float, metavar="R", help="frames a second of the file (default: the model's)")
    diffusion.add_request_arguments(parser)
    diffusion.add_model_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    diffusion.check_files(options)
    from tilewright.outputs.video import check_video_name, encode_video

    output = Path(options.output).expanduser()
    suffix = check_video_name(output)
    files.check_output(output, "--output")
    prompt = diffusion.read_prompt(options.prompt)
    if options.model is None:
        raise RequestError("the embedded model makes only stills: name one, such as -m ./Wan2.1-T2V-1.3B-Diffusers")
    if options.fps is not None and not 1 <= options.fps <= 120:  # written so that NaN fails too
        raise RequestError(f"--fps is {options.fps:g}, expected 1 to 120")
    with diffusion.open_model(options) as model:
        limits = model.limits
        if limits.max_frames == 1:
            raise RequestError(f"{model.name} makes images, not videos: tilewright image")
        fps = options.fps or limits.fps
        num_frames = _num_frames(options, limits, fps)
        params = diffusion.request(model, prompt, options, num_frames=num_frames, output="array")
        made = diffusion.generate(model, params, quiet=options.quiet)
        diffusion.write_files(
            output, made, lambda frames, settings: encode_video(frames, fps, suffix, {**settings, "fps": fps})
        )
        if not options.quiet:
            diffusion.print_times(made)
    return 0


def _num_frames(options: argparse.Namespace, limits: Limits, fps: float) -> int | None:
    """Return the number of frames that the flags set; None for the model's default."""
    if options.seconds is None:
        return options.frames
    if options.frames is not None:
        raise RequestError("--seconds sets the number of frames, expected no --frames with it")
    longest_s = limits.max_frames / fps
    if not 0 < options.seconds <= longest_s:
        raise RequestError(f"--seconds is {options.seconds:g}, expected more than 0 and at most {longest_s:.1f}")
    groups = round((options.seconds * fps - 1) / limits.frame_multiple)
    return 1 + limits.frame_multiple * max(groups, 0)
