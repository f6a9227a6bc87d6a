"""Drawn shapes: where they lie, how large they are, what colour they have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from random import Random

from PIL import Image, ImageDraw

from training.tiny_vl.lesson import with_article

COLOURS = {
    "red": (220, 35, 40),
    "green": (35, 160, 60),
    "blue": (35, 75, 225),
    "yellow": (250, 220, 40),
    "orange": (245, 135, 20),
    "purple": (130, 40, 170),
    "pink": (250, 150, 195),
    "brown": (125, 75, 35),
    "grey": (140, 140, 140),
    "black": (15, 15, 15),
    "white": (252, 252, 252),
}
PLURALS = {
    "circle": "circles",
    "square": "squares",
    "triangle": "triangles",
    "star": "stars",
    "diamond": "diamonds",
    "hexagon": "hexagons",
    "heart": "hearts",
    "cross": "crosses",
}
KINDS = tuple(PLURALS)
# Rows of the image from top to bottom, thirds of each from left to right.
PLACES = (
    ("at the top left", "at the top", "at the top right"),
    ("on the left", "in the centre", "on the right"),
    ("at the bottom left", "at the bottom", "at the bottom right"),
)
SUPERSAMPLING = 2  # drawn larger and averaged down, since Pillow's edges are hard
COLOUR_JITTER = 12
BORDER = 0.035  # of the image's side: centres closer to the line between two thirds lie in no third
GAP = 4  # pixels between shapes


@dataclass(frozen=True)
class Shape:
    kind: str
    colour: str
    x: float
    y: float
    radius: float
    angle: float = 0.0
    tint: tuple[int, int, int] = (0, 0, 0)  # what jitter adds to the colour

    @property
    def name(self) -> str:
        return f"{self.colour} {self.kind}"

    def place(self, width: int, height: int) -> tuple[int, int] | None:
        """Row and column of the third it lies in, None if that is not plain to see."""
        column, row = _third(self.x / width), _third(self.y / height)
        return None if column is None or row is None else (row, column)


@dataclass(frozen=True)
class Scene:
    width: int
    height: int
    background: str
    shapes: tuple[Shape, ...]
    paper: tuple[int, int, int] = (0, 0, 0)  # what jitter adds to the background

    @cached_property
    def places(self) -> list[tuple[int, int] | None]:
        return [shape.place(self.width, self.height) for shape in self.shapes]

    def draw(self) -> Image.Image:
        scale = SUPERSAMPLING
        image = Image.new("RGB", (self.width * scale, self.height * scale), shade(self.background, self.paper))
        pen = ImageDraw.Draw(image)
        for shape in self.shapes:
            draw_shape(pen, shape, scale)
        return image.reduce(scale)


def _third(part: float) -> int | None:
    third = min(int(part * 3), 2)
    nearest_line = min(abs(part - 1 / 3), abs(part - 2 / 3))
    return None if nearest_line < BORDER else third


def shade(colour: str, tint: tuple[int, int, int]) -> tuple[int, int, int]:
    red, green, blue = (min(max(value + add, 0), 255) for value, add in zip(COLOURS[colour], tint, strict=True))
    return red, green, blue


def can_be_told(colour: str, background: str) -> bool:
    return colour != background and {colour, background} != {"grey", "white"}


def jitter(rng: Random) -> tuple[int, int, int]:
    return tuple(rng.randint(-COLOUR_JITTER, COLOUR_JITTER) for _ in range(3))  # type: ignore[return-value]


def draw_shape(pen: ImageDraw.ImageDraw, shape: Shape, scale: int) -> None:
    x, y, radius = shape.x * scale, shape.y * scale, shape.radius * scale
    fill = shade(shape.colour, shape.tint)
    if shape.kind == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        return
    turn = complex(math.cos(shape.angle), math.sin(shape.angle)) * radius
    centre = complex(x, y)
    corners = [centre + turn * corner for corner in outline(shape.kind)]
    pen.polygon([(corner.real, corner.imag) for corner in corners], fill=fill)


@lru_cache
def outline(kind: str) -> tuple[complex, ...]:
    """Corners around 0, within a circle of radius 1; y points down."""

    def spokes(count: int, radii: tuple[float, ...], start: float) -> tuple[complex, ...]:
        angles = [start + 2 * math.pi * i / count for i in range(count)]
        return tuple(
            radii[i % len(radii)] * complex(math.cos(angle), math.sin(angle)) for i, angle in enumerate(angles)
        )

    up = -math.pi / 2
    if kind == "square":
        return spokes(4, (1.0,), math.pi / 4)
    if kind == "triangle":
        return spokes(3, (1.0,), up)
    if kind == "star":
        return spokes(10, (1.0, 0.42), up)
    if kind == "diamond":
        return (complex(0, -1), complex(0.62, 0), complex(0, 1), complex(-0.62, 0))
    if kind == "hexagon":
        return spokes(6, (1.0,), 0.0)
    if kind == "heart":
        steps = [2 * math.pi * i / 60 for i in range(60)]
        return tuple(
            complex(
                0.95 * math.sin(t) ** 3,
                -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 17,
            )
            for t in steps
        )
    if kind == "cross":
        arm = 0.3
        quarter = (complex(-arm, -arm), complex(-arm, -1), complex(arm, -1))
        return tuple(corner * turn for turn in (1, 1j, -1, -1j) for corner in quarter)
    raise ValueError(f"no shape is called {kind!r}")


def random_scene(rng: Random, width: int = 256, height: int = 256, num_shapes: int | None = None) -> Scene:
    """A scene of shapes that do not touch; in some of them every shape lies in a third of its own."""
    background = "white" if rng.random() < 0.4 else rng.choice(tuple(COLOURS))
    if num_shapes is None:
        num_shapes = rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8))
    few_kinds = rng.sample(KINDS, rng.randint(1, 3)) if rng.random() < 0.4 else KINDS  # so that counts vary
    colours = [colour for colour in COLOURS if can_be_told(colour, background)]
    few_colours = rng.sample(colours, rng.randint(1, 3)) if rng.random() < 0.4 else colours
    in_thirds = num_shapes <= 6 and rng.random() < 0.55
    cells = rng.sample([(row, column) for row in range(3) for column in range(3)], num_shapes) if in_thirds else None
    shapes: list[Shape] = []
    for index in range(num_shapes):
        spot = (
            spot_in(rng, cells[index], width, height)
            if cells
            else _free_spot(rng, shapes, width, height, 44 if num_shapes < 4 else 30)
        )
        if spot is None:
            continue
        x, y, radius = spot
        angle = rng.uniform(-0.2, 0.2)
        shapes.append(Shape(rng.choice(few_kinds), rng.choice(few_colours), x, y, radius, angle, jitter(rng)))
    return Scene(width, height, background, tuple(shapes), jitter(rng))


def spot_in(rng: Random, cell: tuple[int, int], width: int, height: int) -> tuple[float, float, float]:
    side = min(width, height) / 3
    radius = rng.uniform(0.18, 0.44) * side
    row, column = cell
    slack_x = max(width / 6 - max(radius, BORDER * width) - GAP / 2, 0)
    slack_y = max(height / 6 - max(radius, BORDER * height) - GAP / 2, 0)
    x = (column + 0.5) * width / 3 + rng.uniform(-slack_x, slack_x)
    y = (row + 0.5) * height / 3 + rng.uniform(-slack_y, slack_y)
    return x, y, radius


def _free_spot(
    rng: Random, others: list[Shape], width: int, height: int, largest: float
) -> tuple[float, float, float] | None:
    for _ in range(30):
        radius = rng.uniform(13, largest)
        x, y = rng.uniform(radius + 2, width - radius - 2), rng.uniform(radius + 2, height - radius - 2)
        if all(math.hypot(x - o.x, y - o.y) > radius + o.radius + GAP for o in others):
            return x, y, radius
    return None


def random_shape_name(rng: Random) -> tuple[str, str]:
    return rng.choice(tuple(COLOURS)), rng.choice(KINDS)


def a_shape(shape: Shape) -> str:
    return with_article(shape.name)
