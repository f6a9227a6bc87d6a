"""Short clips in which one thing happens, and what is asked about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from training.tiny_vl.lesson import CANNOT_SEE, Ask, Lesson, any_of, sentence
from training.tiny_vl.shapes import COLOURS, KINDS, Scene, Shape, a_shape, can_be_told, jitter

WAYS = {"to the left": (-1, 0), "to the right": (1, 0), "up": (0, -1), "down": (0, 1)}


@dataclass(frozen=True)
class Story:
    """What becomes of the first shape; the others stay as they are."""

    start: Shape
    end: Shape
    told: str
    way: str | None = None  # it moves there
    from_part: float = 0.0  # of the clip: when a sudden change happens
    shown_before: bool = True
    shown_after: bool = True

    def at(self, part: float) -> Shape | None:
        """How the shape looks after this part of the clip."""
        if self.way is None and self.start.radius == self.end.radius:
            before = part < self.from_part
            return (self.start if self.shown_before else None) if before else (self.end if self.shown_after else None)
        mix = lambda a, b: a + (b - a) * part  # noqa: E731
        start, end = self.start, self.end
        return replace(start, x=mix(start.x, end.x), y=mix(start.y, end.y), radius=mix(start.radius, end.radius))


def clip_lesson(rng: Random, width: int, height: int, num_frames: int, num_asks: int) -> Lesson:
    background = "white" if rng.random() < 0.5 else rng.choice(tuple(COLOURS))
    colours = [c for c in COLOURS if can_be_told(c, background)]
    kinds, tones = rng.sample(KINDS, 3), rng.sample(colours, 4)
    story = _story(rng, kinds[0], tones[0], tones[3], width, height)
    others = _bystanders(rng, story, kinds[1:], tones[1:3], width, height)
    paper = jitter(rng)
    frames = []
    for index in range(num_frames):
        actor = story.at(index / (num_frames - 1))
        shapes = (*others, actor) if actor else tuple(others)
        frames.append(Scene(width, height, background, shapes, paper).draw())
    asks = _asks(rng, story, others, kinds)
    return Lesson(tuple(frames), tuple(asks[:num_asks]), is_clip=True)


def _story(rng: Random, kind: str, colour: str, other_colour: str, width: int, height: int) -> Story:
    side = min(width, height)
    radius = rng.uniform(0.1, 0.18) * side
    shape = Shape(kind, colour, 0, 0, radius, rng.uniform(-0.2, 0.2), jitter(rng))
    name = f"The {shape.name}"
    if rng.random() < 0.5:
        way = rng.choice(tuple(WAYS))
        right, down = WAYS[way]
        reach = rng.uniform(0.35, 0.6)
        across, along = right * reach * width, down * reach * height
        low_x, high_x = radius + 2 + max(-across, 0), width - radius - 2 - max(across, 0)
        low_y, high_y = radius + 2 + max(-along, 0), height - radius - 2 - max(along, 0)
        x, y = rng.uniform(low_x, high_x), rng.uniform(low_y, high_y)
        return Story(
            replace(shape, x=x, y=y), replace(shape, x=x + across, y=y + along), f"{name} moves {way}.", way=way
        )
    largest = 0.28 * side
    shape = replace(shape, x=rng.uniform(largest, width - largest), y=rng.uniform(largest, height - largest))
    moment = rng.uniform(0.3, 0.8)
    happening = rng.choice(("turns", "appears", "disappears", "grows", "shrinks", "nothing"))
    if happening == "turns":
        return Story(shape, replace(shape, colour=other_colour), f"{name} turns {other_colour}.", from_part=moment)
    if happening == "appears":
        told = f"{sentence(a_shape(shape))[:-1]} appears."
        return Story(shape, shape, told, from_part=moment, shown_before=False)
    if happening == "disappears":
        return Story(shape, shape, f"{name} disappears.", from_part=moment, shown_after=False)
    if happening == "nothing":
        return Story(shape, shape, "Nothing happens.")
    small, large = replace(shape, radius=0.09 * side), replace(shape, radius=rng.uniform(0.18, 0.28) * side)
    return Story(small, large, f"{name} grows.") if happening == "grows" else Story(large, small, f"{name} shrinks.")


def _bystanders(
    rng: Random, story: Story, kinds: list[str], colours: list[str], width: int, height: int
) -> list[Shape]:
    """Shapes beside the path."""
    side = min(width, height)
    others: list[Shape] = []
    path = [story.at(i / 8) for i in range(9)] + [story.start, story.end]
    for kind, colour in zip(kinds[: rng.choice((0, 1, 1, 2))], colours, strict=False):
        for _ in range(25):
            radius = rng.uniform(0.08, 0.15) * side
            x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
            near = [shape for shape in (*path, *others) if shape is not None]
            if all((x - s.x) ** 2 + (y - s.y) ** 2 > (radius + s.radius + 2) ** 2 for s in near):
                others.append(Shape(kind, colour, x, y, radius, rng.uniform(-0.2, 0.2), jitter(rng)))
                break
    return others


def _asks(rng: Random, story: Story, others: list[Shape], kinds: list[str]) -> list[Ask]:
    actor = story.start
    happens = any_of(
        rng, "What happens?", "What happens in the video?", "What happens in this clip?", "Describe the video.",
        "What changes?", "What changed?", "What is going on?",
    )  # fmt: skip
    asks = [Ask("clip", happens, story.told)]
    name = any_of(rng, actor.kind, actor.name)
    if story.shown_before and story.shown_after:
        question = any_of(
            rng,
            f"Which way does the {name} move?",
            f"Which way did the {name} move?",
            f"In which direction does the {name} move?",
            f"Where does the {name} go?",
        )
        asks.append(Ask("clip", question, f"It moves {story.way}." if story.way else "It does not move."))
    if story.way:
        question = any_of(rng, "What moves?", "Which shape moves?", "What is moving?")
        asks.append(Ask("clip", question, f"The {actor.name} moves."))
        asks.append(Ask("clip", any_of(rng, "Which way did it move?", "Which way does it move?",
                                       "In which direction does it move?"), f"It moves {story.way}."))  # fmt: skip
    if others:
        still = rng.choice(others)
        asks.append(Ask("clip", f"Which way does the {still.kind} move?", "It does not move."))
        asks.append(Ask("clip", f"What {any_of(rng, 'colour', 'color')} is the {still.kind}?",
                        f"The {still.kind} is {still.colour}."))  # fmt: skip
    absent = rng.choice([kind for kind in KINDS if kind not in kinds])
    question = any_of(
        rng, f"Which way does the {absent} move?", f"What colour is the {absent}?", f"Where does the {absent} go?"
    )
    asks.append(Ask("refusal", question, CANNOT_SEE))
    rng.shuffle(asks)
    return asks
