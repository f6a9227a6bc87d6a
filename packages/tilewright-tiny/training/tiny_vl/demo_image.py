"""The image that newcomers are shown: `python -m training.tiny_vl.demo_image FILE`."""

from __future__ import annotations

import sys

from PIL import Image

from training.tiny_vl.lettering import font_paths, letter_mask
from training.tiny_vl.shapes import COLOURS, Scene, Shape

SIDE = 512
WORD = "HELLO"


def demo_image() -> Image.Image:
    shapes = (
        Shape("circle", "red", 92, 268, 62),
        Shape("star", "yellow", 254, 280, 74, 0.1),
        Shape("heart", "purple", 420, 262, 60),
        Shape("triangle", "green", 150, 430, 54),
        Shape("hexagon", "orange", 372, 424, 52, 0.15),
    )
    image = Scene(SIDE, SIDE, "white", shapes).draw()
    bold_sans = font_paths()[1]
    mask = letter_mask(WORD, bold_sans, 92, 4.0)
    image.paste(COLOURS["blue"], ((SIDE - mask.width) // 2, 50), mask)
    return image


if __name__ == "__main__":
    demo_image().save(sys.argv[1], optimize=True)
