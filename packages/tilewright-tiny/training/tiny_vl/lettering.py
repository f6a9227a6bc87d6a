"""Lines of text in many fonts, sizes, colours and slight turns."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw, ImageFont

from training.tiny_vl.shapes import COLOURS, jitter, shade

# Fonts that Python packages carry, so that every machine draws the same images.
FONT_FILES = {
    "matplotlib": (
        "mpl-data/fonts/ttf/DejaVuSans.ttf",
        "mpl-data/fonts/ttf/DejaVuSans-Bold.ttf",
        "mpl-data/fonts/ttf/DejaVuSerif.ttf",
        "mpl-data/fonts/ttf/DejaVuSerif-Bold.ttf",
        "mpl-data/fonts/ttf/DejaVuSansMono.ttf",
        "mpl-data/fonts/ttf/DejaVuSansMono-Bold.ttf",
        "mpl-data/fonts/ttf/STIXGeneral.ttf",
        "mpl-data/fonts/ttf/STIXGeneralBol.ttf",
    ),
    "font_caladea": ("files/Caladea-Regular.ttf", "files/Caladea-Bold.ttf"),
    "font_hanken_grotesk": ("files/HankenGrotesk-Regular.otf", "files/HankenGrotesk-Bold.otf"),
    "font_manrope": ("files/Manrope-Regular.ttf", "files/Manrope-Bold.ttf"),
}
LARGEST_TURN = 12.0  # degrees
SMALLEST_TEXT, LARGEST_TEXT = 24, 60  # pixels of the font's size in an image of 256 by 256


@dataclass(frozen=True)
class Line:
    """A line of text as it was drawn: its ink's box in the image."""

    text: str
    colour: str
    left: int
    top: int
    right: int
    bottom: int

    def overlaps(self, other: Line, gap: int = 3) -> bool:
        return not (
            self.right + gap <= other.left
            or other.right + gap <= self.left
            or self.bottom + gap <= other.top
            or other.bottom + gap <= self.top
        )


@lru_cache
def font_paths() -> tuple[Path, ...]:
    found = []
    for package, files in FONT_FILES.items():
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise RuntimeError(f"the fonts of the package {package!r} are not installed: pip install {package}")
        found += [Path(spec.submodule_search_locations[0]) / file for file in files]
    return tuple(found)


@lru_cache(4096)
def font(path: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)


def letter_mask(text: str, path: Path, size: int, turn: float) -> Image.Image:
    """The text's ink as coverage, turned, cut to its box."""
    face = font(path, size)
    left, top, right, bottom = face.getbbox(text)
    mask = Image.new("L", (int(right - left) + 2, int(bottom - top) + 2), 0)
    ImageDraw.Draw(mask).text((1 - left, 1 - top), text, fill=255, font=face)
    if turn:
        mask = mask.rotate(turn, Image.Resampling.BICUBIC, expand=True)
    return mask.crop(mask.getbbox() or (0, 0, 1, 1))


def write(image: Image.Image, text: str, colour: str, mask: Image.Image, left: int, top: int, rng: Random) -> Line:
    image.paste(shade(colour, jitter(rng)), (left, top), mask)
    return Line(text, colour, left, top, left + mask.width, top + mask.height)


def random_line(rng: Random, image: Image.Image, text: str, background: str, others: list[Line]) -> Line | None:
    """The text somewhere in the image where nothing is yet; None if there is no room."""
    path = rng.choice(font_paths())
    turn = 0.0 if rng.random() < 0.5 else rng.uniform(-LARGEST_TURN, LARGEST_TURN)
    room = image.width - 8
    size = rng.randint(SMALLEST_TEXT, LARGEST_TEXT)
    length = font(path, size).getlength(text)
    if length > room:
        size = int(size * room / length)
        if size < SMALLEST_TEXT:
            return None
    mask = letter_mask(text, path, size, turn)
    if mask.width > image.width - 4 or mask.height > image.height - 4:
        return None
    colour = rng.choice(readable_on(background))
    for _ in range(12):
        left = rng.randint(2, image.width - mask.width - 2)
        top = rng.randint(2, image.height - mask.height - 2)
        line = Line(text, colour, left, top, left + mask.width, top + mask.height)
        if not any(line.overlaps(other) for other in others):
            return write(image, text, colour, mask, left, top, rng)
    return None


@lru_cache
def readable_on(background: str) -> tuple[str, ...]:
    """Colours that differ enough in brightness from the background."""

    def brightness(colour: str) -> float:
        red, green, blue = COLOURS[colour]
        return 0.3 * red + 0.59 * green + 0.11 * blue

    return tuple(colour for colour in COLOURS if abs(brightness(colour) - brightness(background)) > 60)
