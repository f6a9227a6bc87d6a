"""Scenes with captions: what a caption says is so in its scene, and questions whose answers follow from the caption."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from training.tiny_vl.lesson import Ask, any_of, joined, with_article
from training.tiny_vl.shapes import COLOURS, GAP, KINDS, PLACES, PLURALS, Scene, Shape, can_be_told, jitter, spot_in

SETS = {"test": 0, "validation": 1}  # the remainder that the captions of a set have
MODULUS = 40
NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
RELATIONS = {
    "left of": ("left of", "to the left of", "on the left of"),
    "right of": ("right of", "to the right of", "on the right of"),
    "above": ("above",),
    "below": ("below", "under"),
}
APART = 0.24  # of the image's side: how far apart two shapes are that lie left of or above each other
LARGE, SMALL = (0.155, 0.2), (0.055, 0.08)  # radii, of the image's shorter side
USUAL, FEW, MANY = (0.065, 0.17), (0.075, 0.15), (0.055, 0.11)
TRIES = 200
# How often each kind of caption comes up: in the sets that are asked about, and in training, which has more of what is
# hardest to learn.
ASKED = {"one": 12, "listed": 18, "placed": 22, "related": 26, "counted": 12, "sized": 10}
LEARNT = {"one": 4, "listed": 30, "placed": 13, "related": 13, "counted": 33, "sized": 7}
ALIKE = 0.35  # of the training captions have shapes of two colours and three kinds: which is which is hard there


@dataclass(frozen=True)
class Drawing:
    """A caption, a scene that it describes, and what may be asked of any image with this caption."""

    kind: str  # of caption
    caption: str
    scene: Scene
    asks: tuple[Ask, ...]
    content: str  # what the caption says, whatever its words: no two sets share one

    @property
    def set_name(self) -> str:
        digest = hashlib.sha256(self.content.encode()).digest()
        remainder = int.from_bytes(digest[:4], "little") % MODULUS
        return next((name for name, value in SETS.items() if value == remainder), "training")


def drawings(rng: Random, width: int = 256, height: int = 256, set_name: str = "training") -> Iterator[Drawing]:
    """Those of one set, without end."""
    shares, alike = (LEARNT, ALIKE) if set_name == "training" else (ASKED, 0.0)
    while True:
        drawing = random_drawing(rng, width, height, shares, alike)
        if drawing is not None and drawing.set_name == set_name:
            yield drawing


def random_drawing(
    rng: Random, width: int, height: int, shares: Mapping[str, int], alike: float = 0.0
) -> Drawing | None:
    """One of any set, its kind by these shares; None where the shapes found no room."""
    background, said = _background(rng)
    colours = [colour for colour in COLOURS if can_be_told(colour, background)]
    kinds: Sequence[str] = KINDS
    if alike and rng.random() < alike:
        colours, kinds = rng.sample(colours, 2), rng.sample(KINDS, 3)
    kind = rng.choices(tuple(shares), tuple(shares.values()))[0]
    made = MAKERS[kind](rng, _Paper(rng, width, height, colours, kinds))
    if made is None:
        return None
    words, what, shapes, asks = made
    content = f"{what} on {background}"
    if said:
        words = f"{words} {said}"
        asks = [*asks, Ask("background", "What colour is the background?", f"The background is {background}.")]
    asks = [*asks, *_counts(shapes)]
    scene = Scene(width, height, background, tuple(shapes), jitter(rng))
    return Drawing(kind, _casual(rng, words), scene, tuple(asks), content)


def _background(rng: Random) -> tuple[str, str]:
    """Its colour and what the caption says of it: white where it says nothing."""
    if rng.random() < 0.6:
        return "white", ""
    colour = rng.choice(tuple(COLOURS))
    return colour, any_of(rng, f"on a {colour} background", f"on {colour}", f"on a {colour} background")


@dataclass(frozen=True)
class _Paper:
    """Where shapes are put, and the colours and kinds they may have."""

    rng: Random
    width: int
    height: int
    colours: Sequence[str]
    kinds: Sequence[str]

    def names(self, count: int) -> list[tuple[str, str]]:
        """So many different pairs of a colour and a kind."""
        pairs = {(self.rng.choice(self.colours), self.rng.choice(self.kinds)) for _ in range(4 * count)}
        return self.rng.sample(sorted(pairs), count) if len(pairs) >= count else self.names(count)

    def shape(self, name: tuple[str, str], x: float, y: float, radius: float) -> Shape:
        colour, kind = name
        return Shape(kind, colour, x, y, radius, self.rng.uniform(-0.15, 0.15), jitter(self.rng))

    def scattered(self, names: list[tuple[str, str]], ranges: list[tuple[float, float]]) -> list[Shape] | None:
        """Shapes that do not touch, with radii from these ranges; None where there is no room."""
        side = min(self.width, self.height)
        for _ in range(TRIES):
            shapes: list[Shape] = []
            for name, (least, most) in zip(names, ranges, strict=True):
                radius = self.rng.uniform(least, most) * side
                x = self.rng.uniform(radius + 3, self.width - radius - 3)
                y = self.rng.uniform(radius + 3, self.height - radius - 3)
                if any(abs(complex(x - o.x, y - o.y)) < radius + o.radius + 2 * GAP for o in shapes):
                    break
                shapes.append(self.shape(name, x, y, radius))
            else:
                return shapes
        return None


_Made = tuple[str, str, list[Shape], list[Ask]]  # words, what they say however it is worded, shapes, questions


def _one(rng: Random, paper: _Paper) -> _Made | None:
    [name] = paper.names(1)
    shapes = paper.scattered([name], [USUAL])
    return None if shapes is None else (_a(name), _a(name), shapes, [])


def _listed(rng: Random, paper: _Paper) -> _Made | None:
    names = paper.names(rng.choice((2, 2, 3, 3, 4)))
    shapes = paper.scattered(names, [FEW] * len(names))
    return (
        None
        if shapes is None
        else (joined([_a(name) for name in names]), joined([_a(name) for name in sorted(names)]), shapes, [])
    )


def _placed(rng: Random, paper: _Paper) -> _Made | None:
    names = paper.names(rng.choice((1, 1, 2, 2, 3, 4)))
    cells = rng.sample([(row, column) for row in range(3) for column in range(3)], len(names))
    shapes = [
        paper.shape(name, *spot_in(rng, cell, paper.width, paper.height))
        for name, cell in zip(names, cells, strict=True)
    ]
    places = [PLACES[row][column] for row, column in cells]
    parts = [f"{_a(name)} {place}" for name, place in zip(names, places, strict=True)]
    asks = [
        Ask("position", f"Where is the {' '.join(name)}?", f"The {' '.join(name)} is {place}.")
        for name, place in zip(names, places, strict=True)
    ]
    return joined(parts), joined(sorted(parts)), shapes, asks


def _related(rng: Random, paper: _Paper) -> _Made | None:
    names = paper.names(2)
    relation = rng.choice(tuple(RELATIONS))
    for _ in range(TRIES):
        shapes = paper.scattered(names, [FEW, FEW])
        if shapes is not None and _is_so(relation, shapes, paper):
            break
    else:
        return None
    words = f"{_a(names[0])} {rng.choice(RELATIONS[relation])} {_a(names[1])}"
    question = f"Is the {' '.join(names[0])} {relation} the {' '.join(names[1])}?"
    first, second = names if relation in ("left of", "above") else names[::-1]
    axis = "left of" if relation in ("left of", "right of") else "above"
    return words, f"{_a(first)} {axis} {_a(second)}", shapes, [Ask("relation", question, "Yes.")]


def _is_so(relation: str, shapes: list[Shape], paper: _Paper) -> bool:
    one, other = shapes
    across, down = (one.x - other.x) / paper.width, (one.y - other.y) / paper.height
    return {"left of": -across, "right of": across, "above": -down, "below": down}[relation] > APART


def _counted(rng: Random, paper: _Paper) -> _Made | None:
    names = paper.names(rng.choice((1, 1, 2)))
    counts = [rng.randint(2, 6 if len(names) == 1 else 3) for _ in names]
    if len(names) == 2 and rng.random() < 0.5:
        counts[1] = 1
    every = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    shapes = paper.scattered(every, [MANY] * len(every))
    groups = []
    for (colour, kind), count in zip(names, counts, strict=True):
        number = str(count) if rng.random() < 0.25 else NUMBERS[count]
        groups.append(_a((colour, kind)) if count == 1 else f"{number} {colour} {PLURALS[kind]}")
    what = joined(sorted(f"{count} {_a(name)}" for name, count in zip(names, counts, strict=True)))
    return None if shapes is None else (joined(groups), what, shapes, [])


def _sized(rng: Random, paper: _Paper) -> _Made | None:
    names = paper.names(2)
    large_first = rng.random() < 0.5
    shapes = paper.scattered(names, [LARGE, SMALL] if large_first else [SMALL, LARGE])
    large, small = any_of(rng, "large", "big"), any_of(rng, "small", "tiny", "small")
    sizes = (large, small) if large_first else (small, large)
    words = joined([f"a {size} {' '.join(name)}" for size, name in zip(sizes, names, strict=True)])
    larger, smaller = names if large_first else names[::-1]
    question = f"Which is larger, the {' '.join(larger)} or the {' '.join(smaller)}?"
    what = f"large {' '.join(larger)}, small {' '.join(smaller)}"
    return (
        None if shapes is None else (words, what, shapes, [Ask("size", question, f"The {' '.join(larger)} is larger.")])
    )


MAKERS: dict[str, Callable[[Random, _Paper], _Made | None]] = {
    "one": _one,
    "listed": _listed,
    "placed": _placed,
    "related": _related,
    "counted": _counted,
    "sized": _sized,
}


def _counts(shapes: list[Shape]) -> list[Ask]:
    """How many there are, of each name and of all."""
    asks = []
    for (colour, kind), count in Counter((shape.colour, shape.kind) for shape in shapes).items():
        answer = f"There is 1 {colour} {kind}." if count == 1 else f"There are {count} {colour} {PLURALS[kind]}."
        asks.append(Ask("count", f"How many {colour} {PLURALS[kind]} are there?", answer))
    answer = "There is 1 shape." if len(shapes) == 1 else f"There are {len(shapes)} shapes."
    return [*asks, Ask("count", "How many shapes are there?", answer)]


def _a(name: tuple[str, str]) -> str:
    return with_article(" ".join(name))


def _casual(rng: Random, words: str) -> str:
    """The caption as some people type it."""
    way = rng.random()
    if way < 0.16:
        words = f"{any_of(rng, 'draw', 'a picture of', 'a drawing of', 'an image of')} {words}"
    if rng.random() < 0.2:
        words = words[0].upper() + words[1:]
    if rng.random() < 0.2:
        words += "."
    return words.replace("grey", "gray") if rng.random() < 0.2 else words
