"""`tilewright demo`: answers questions about an image, makes an image and describes it, answers a spoken question."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright import config
from tilewright.cli import chat
from tilewright.flags import engine as engine_flags
from tilewright.flags.diffusion import read_image
from tilewright.flags.options import positive
from tilewright.host import files
from tilewright.outputs.sound import encode, to_pcm16
from tilewright.types import Completion
from tilewright.weights import embedded

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    from tilewright.engine.engine import Engine

QUESTIONS = ("Describe the picture.", "How many shapes are there?", "What does it say?")
DRAWN = "a red circle left of a blue square"
QUESTION_OF_DRAWN = "Describe the picture."
QUESTIONS_OF_SOUND = ("What is said?", "Answer the question.")  # the last answer is also spoken
SPOKEN_FILE = Path("tilewright-answer.wav")
SEED = 1
MAX_TOKENS = 64
BOLD, DIM, RESET = "\033[1m", "\033[2m", "\033[0m"
PREVIEW_SIZE = 36, 36  # pixels at most, width and height
_CUBE_LEVELS = (0, 95, 135, 175, 215, 255)  # values of each channel in the 216 colours of terminals


def add_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `demo`."""
    parser = commands.add_parser(
        "demo",
        help="answer questions about an image",
        description="Answers each QUESTION about an image on standard output, with the time to the first token and "
        "the speed. Without arguments, embedded models answer three questions about an embedded image, make a "
        "image and describe it, and answer a spoken question, "
        f"in {SPOKEN_FILE} too if the model has a voice. "
        "NO_COLOR or a pipe turns colours off.",
        epilog="""examples:
  tilewright demo
  tilewright demo "How many circles are there?" "Where is the star?"
  tilewright demo "What is on it?" -m ./Qwen3-VL-2B-Instruct --image photo.jpg    an image of yours
  NO_COLOR=1 tilewright demo""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"default: {' '.join(QUESTIONS)}")
    parser.add_argument("--image", metavar="FILE", help="the image (default: an embedded one)")
    parser.add_argument(
        "--max-tokens", type=positive, default=MAX_TOKENS, metavar="N",
        help=f"most tokens of an answer (default {MAX_TOKENS})",
    )  # fmt: skip
    engine_flags.add_arguments(parser, max_sequences=1)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    path = embedded.demo_file("demo.png") if options.image is None else Path(options.image).expanduser()
    image = read_image(path, f"image {path}")  # before the model is loaded
    style = Style.of_terminal()
    started_s = time.perf_counter()
    with engine_flags.open_engine(options, progress=sys.stderr.isatty()) as engine:
        ready = f"ready in {time.perf_counter() - started_s:.1f} s"
        print(f"{style.bold(engine.loaded.name)} {style.dim(ready)}")
        print(f"{path} {style.dim(f'{image.width}x{image.height}')}")
        _show(image, style)
        for question in options.questions or QUESTIONS:
            _ask(engine, image, question, options.max_tokens, style)
        if _is_bare(options) and embedded.has("tiny_draw"):
            drawn = _draw(style)
            _show(drawn, style)
            _ask(engine, drawn, QUESTION_OF_DRAWN, options.max_tokens, style)
        if _is_bare(options) and embedded.has("tiny_omni"):
            _listen(options.max_tokens, style)
    return 0


def _is_bare(options: argparse.Namespace) -> bool:
    """Return whether no question, image or model is given."""
    return not options.questions and options.image is None and options.model is None


def _draw(style: Style) -> Image.Image:
    """Make an image from words with the embedded diffusion model."""
    from tilewright.diffusion.diffusion import Diffusion

    command = f'tilewright image "{DRAWN}"'
    print(f"\n{style.bold(command)}", flush=True)
    with Diffusion() as diffusion:
        made = diffusion.generate(DRAWN, seed=SEED)
        [image] = made.images
        took = f"{image.width}x{image.height}, {made.params.num_steps} steps, {made.timings.total_s:.1f} s"
        print(f"{diffusion.name} {style.dim(took)}", flush=True)
    return image


def _show(image: Image.Image, style: Style) -> None:
    """Print a preview if standard output can show one."""
    if style.is_colourful and sys.stdout.encoding.lower().startswith("utf"):
        print("\n" + preview(image))


def _ask(engine: Engine, image: Image.Image, question: str, max_tokens: int, style: Style) -> None:
    content: list[dict[str, Any]] = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    _write_answer(engine, content, question, max_tokens, style)


def _listen(max_tokens: int, style: Style) -> None:
    """Transcribe and answer a spoken question with the embedded model for speech."""
    from tilewright.engine.engine import Engine

    file = embedded.demo_file("demo.wav")
    sound = {"type": "audio", "audio": str(file)}
    print(f"\n{file}", flush=True)
    with Engine(embedded.path("tiny_omni"), max_sequences=1) as engine:
        print(style.dim(engine.loaded.name))
        for question in QUESTIONS_OF_SOUND:
            content = [sound, {"type": "text", "text": question}]
            is_spoken = bool(engine.voices) and question == QUESTIONS_OF_SOUND[-1]
            completion = _write_answer(engine, content, question, max_tokens, style, is_spoken=is_spoken)
    if completion.audio is not None and completion.audio_rate is not None:
        _save(completion.audio, completion.audio_rate, style)


def _save(samples: np.ndarray, rate: int, style: Style) -> None:
    files.write_bytes(SPOKEN_FILE, encode(to_pcm16(samples), rate, "wav"))
    print(f"{SPOKEN_FILE} {style.dim(f'{len(samples) / rate:.1f} s of speech')}", flush=True)


def _write_answer(
    engine: Engine,
    content: list[dict[str, Any]],
    question: str,
    max_tokens: int,
    style: Style,
    *,
    is_spoken: bool = False,
) -> Completion:
    print(f"\n{style.bold(question)}", flush=True)
    completion = answer(engine, content, max_tokens, is_spoken=is_spoken)
    print(f"\n{style.dim(chat.speeds(completion))}", flush=True)
    return completion


def answer(engine: Engine, content: list[dict[str, Any]], max_tokens: int, *, is_spoken: bool = False) -> Completion:
    """Return the answer, after writing it to standard output as it arrives."""
    spoken: dict[str, Any] = {"modalities": ("text", "audio")} if is_spoken else {}
    messages = [{"role": "user", "content": content}]
    handle = engine.submit_chat(messages, temperature=0.0, max_tokens=max_tokens, **spoken)
    try:
        for delta in handle:
            print(delta.text, end="", flush=True)
    except BaseException:  # Ctrl-C, or a closed pipe
        handle.abort()
        raise
    (completion,) = handle.result()
    return completion


@dataclass(frozen=True)
class Style:
    """Makes bold and dim text if standard output is a terminal with colours, else plain text."""

    is_colourful: bool

    @classmethod
    def of_terminal(cls) -> Style:
        return cls(sys.stdout.isatty() and not config.current().no_color)

    def bold(self, text: str) -> str:
        return f"{BOLD}{text}{RESET}" if self.is_colourful else text

    def dim(self, text: str) -> str:
        return f"{DIM}{text}{RESET}" if self.is_colourful else text


def preview(image: Image.Image) -> str:
    """Return the image as characters; each shows two pixels, one above the other."""
    scale = min(PREVIEW_SIZE[0] / image.width, PREVIEW_SIZE[1] / image.height)
    columns = min(max(1, round(image.width * scale)), shutil.get_terminal_size().columns)
    rows = max(1, round(image.height * scale / 2))
    data = image.resize((columns, 2 * rows)).tobytes()
    colours = [_cube_colour(*data[begin : begin + 3]) for begin in range(0, len(data), 3)]
    lines = []
    for begin in range(0, len(colours), 2 * columns):
        upper, lower = colours[begin : begin + columns], colours[begin + columns : begin + 2 * columns]
        cells = [f"\033[38;5;{above};48;5;{below}m▀" for above, below in zip(upper, lower, strict=True)]
        lines.append("".join(cells) + RESET)
    return "\n".join(lines)


def _cube_colour(red: int, green: int, blue: int) -> int:
    """Return the number of the nearest of a terminal's 216 colours."""
    return 16 + 36 * _cube_level(red) + 6 * _cube_level(green) + _cube_level(blue)


def _cube_level(value: int) -> int:
    return min(range(6), key=lambda level: abs(_CUBE_LEVELS[level] - value))
