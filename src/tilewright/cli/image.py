"""`tilewright image`: images from words."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from tilewright.flags import diffusion
from tilewright.flags.options import positive
from tilewright.host import files
from tilewright.types import RequestError
from tilewright.weights import embedded

FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


def add_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `image`."""
    parser = commands.add_parser(
        "image",
        help="make an image from words",
        description="Makes images of PROMPT and prints the names of their files. Each file contains the settings to "
        "make its image again. Without -m: a small embedded model that draws coloured shapes.",
        epilog="""examples:
  tilewright image "a red circle left of a blue square"
  tilewright image "a lighthouse at dusk" -m ./Z-Image-Turbo -o lighthouse.png --size 1024x768 --seed 7
  tilewright image "a cat, ink drawing" -m MODEL -n 4 -o cat.png          cat-1.png to cat-4.png
  tilewright image "a cat" -m MODEL --negative "blurry" --guidance 4 --steps 28
  tilewright image "make it winter" -m MODEL --image house.png -o winter.png      an image of yours
  tilewright image "a cat" -m MODEL --low-memory                          one network in memory at a time""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", metavar="PROMPT", help="what to show; -: read it from standard input")
    parser.add_argument(
        "-o", "--output", default="picture.png", metavar="FILE", help=".png, .jpg or .webp (default picture.png)"
    )
    parser.add_argument("-n", type=positive, default=1, metavar="N", help="number of images, with consecutive seeds")
    diffusion.add_request_arguments(parser)
    diffusion.add_model_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    output = Path(options.output).expanduser()
    file_format = _format(output)
    diffusion.check_files(options)
    prompt = diffusion.read_prompt(options.prompt)
    if options.model is None and embedded.path("tiny_draw") and not options.quiet:
        print(f"tilewright: {embedded.notice('-m ./Z-Image-Turbo', 'tiny_draw')}", file=sys.stderr)
    with diffusion.open_model(options) as model:
        params = diffusion.request(model, prompt, options, n=options.n, output="array")
        made = diffusion.generate(model, params, quiet=options.quiet)
        from tilewright.outputs.images import encode_image

        diffusion.write_files(output, made, lambda pixels, settings: encode_image(pixels[0], file_format, settings))
        if not options.quiet:
            diffusion.print_times(made)
    return 0


def _format(path: Path) -> str:
    if path.suffix.lower() not in FORMATS:
        raise RequestError(f"--output is {path}, expected a name that ends in {', '.join(FORMATS)}")
    files.check_output(path, "--output")
    return FORMATS[path.suffix.lower()]
