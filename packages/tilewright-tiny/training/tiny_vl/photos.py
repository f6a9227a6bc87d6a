"""Images of what the model was never taught, so that it says so instead of guessing."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter

from training.tiny_vl.lesson import CANNOT_SEE, Ask, Lesson, any_of, describing, with_article
from training.tiny_vl.shapes import COLOURS, KINDS, PLURALS
from training.tiny_vl.words import THINGS

NOT_A_DRAWING = "I can't tell. I only know simple drawn pictures."


def photo_lesson(rng: Random, width: int, height: int, num_asks: int, folder: Path | None = None) -> Lesson:
    """A piece of a photograph from the folder, or something as busy as one."""
    photographs = photograph_files(folder) if folder else ()
    if photographs and rng.random() < 0.6:
        image = _piece(rng, rng.choice(photographs), width, height)
    else:
        image = texture(rng, width, height)
    return Lesson((image,), tuple(_asks(rng)[:num_asks]))


@lru_cache
def photograph_files(folder: Path) -> tuple[Path, ...]:
    files = tuple(sorted(file for file in folder.iterdir() if file.suffix.lower() in (".jpg", ".jpeg", ".png")))
    if not files:
        raise RuntimeError(f"{folder} has no .jpg or .png files")
    return files


@lru_cache(64)
def _photograph(file: Path) -> Image.Image:
    image = Image.open(file).convert("RGB")
    image.thumbnail((640, 640))
    return image


def _piece(rng: Random, file: Path, width: int, height: int) -> Image.Image:
    whole = _photograph(file)
    share = rng.uniform(0.35, 1.0)
    scale = min(whole.width / width, whole.height / height) * share
    piece_width, piece_height = width * scale, height * scale
    left, top = rng.uniform(0, whole.width - piece_width), rng.uniform(0, whole.height - piece_height)
    box = (left, top, left + piece_width, top + piece_height)
    piece = whole.resize((width, height), Image.Resampling.BILINEAR, box)
    if rng.random() < 0.5:
        piece = piece.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if rng.random() < 0.5:
        piece = ImageEnhance.Color(piece).enhance(rng.uniform(0.0, 1.6))
    if rng.random() < 0.5:
        piece = ImageEnhance.Brightness(piece).enhance(rng.uniform(0.5, 1.5))
    return piece


def texture(rng: Random, width: int, height: int) -> Image.Image:
    """Blurred colours of several sizes over one another, with some edges."""
    noise = np.random.default_rng(rng.getrandbits(32))
    total = np.zeros((height, width, 3), np.float32)
    for cells in rng.sample((2, 3, 5, 9, 17, 33, 65), rng.randint(2, 4)):
        coarse = Image.fromarray(noise.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        total += np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32) * rng.uniform(0.3, 1)
    total -= total.min()
    image = Image.fromarray((total * (255 / max(float(total.max()), 1.0))).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for _ in range(rng.choice((0, 0, 2, 6, 15))):
        corners = [(rng.uniform(0, width), rng.uniform(0, height)) for _ in range(rng.randint(3, 5))]
        pen.polygon(corners, fill=tuple(rng.randrange(256) for _ in range(3)))
    if rng.random() < 0.5:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.5, 4)))
    return image


def _asks(rng: Random) -> list[Ask]:
    kind, thing, word = rng.choice(KINDS), rng.choice(THINGS), any_of(rng, "colour", "color")
    colour = rng.choice(tuple(COLOURS))
    asks = [
        Ask("refusal", describing(rng), NOT_A_DRAWING),
        Ask("refusal", any_of(rng, f"Is there {with_article(thing)}?", f"Do you see {with_article(thing)}?",
                              "Who is in the picture?", "Where was this picture taken?", "What is happening?",
                              "Is this a photo?", "What is this?"), NOT_A_DRAWING),
        Ask("refusal", any_of(rng, f"What {word} is the {kind}?", f"Where is the {kind}?", f"Where is the {thing}?",
                              f"What {word} is the {thing}?", f"Where is the {colour} {kind}?",
                              f"What is the {thing} doing?"), CANNOT_SEE),
        Ask("refusal", any_of(rng, "What does it say?", "Read the text.", "What is written here?",
                              "Which bar is the tallest?", f"What is the value of {rng.choice('ABCDEF')}?",
                              f"How many {PLURALS[kind]} are there?", "How many shapes are there?"), CANNOT_SEE),
    ]  # fmt: skip
    rng.shuffle(asks)
    return asks
