"""Images of writing, and what is asked about them."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from PIL import Image

from training.tiny_vl.ask_shapes import ask_about
from training.tiny_vl.lesson import CANNOT_SEE, Ask, Lesson, any_of, describing, joined
from training.tiny_vl.lettering import Line, random_line
from training.tiny_vl.shapes import COLOURS, KINDS, Scene, Shape, jitter, random_scene, shade
from training.tiny_vl.words import LETTERS, SHORT_WORDS, is_number, random_text


def text_lesson(rng: Random, width: int, height: int, num_asks: int) -> Lesson:
    """One to four texts on a plain ground, or one over a scene of shapes."""
    if rng.random() < 0.15:
        return _text_beside_shapes(rng, width, height, num_asks)
    background = "white" if rng.random() < 0.35 else rng.choice(tuple(COLOURS))
    image = Image.new("RGB", (width, height), shade(background, jitter(rng)))
    # Letters and short words teach to find what a question names, which charts then build on.
    is_of_labels = rng.random() < 0.25
    lines: list[Line] = []
    for text in _labels(rng) if is_of_labels else _texts(rng):
        line = random_line(rng, image, text, background, lines)
        if line is not None:
            lines.append(line)
    if not lines:
        return text_lesson(rng, width, height, num_asks)
    asks = _read_one(rng, lines[0]) if len(lines) == 1 else _read_some(rng, lines)
    asks.append(_refuse(rng, lines))
    if rng.random() < 0.4:
        asks += _other_asks(rng, lines, background)
    found = _find(rng, lines)
    first, others = (found, asks) if is_of_labels else ([], [*asks, *found[:2]])
    rng.shuffle(others)
    return Lesson((image,), tuple([*first, *others][:num_asks]))


def _texts(rng: Random) -> list[str]:
    return [random_text(rng) for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4)))]


def _labels(rng: Random) -> list[str]:
    return rng.sample(LETTERS if rng.random() < 0.5 else SHORT_WORDS, rng.randint(2, 5))


def _text_beside_shapes(rng: Random, width: int, height: int, num_asks: int) -> Lesson:
    """A line of text above or below the shapes."""
    base = random_scene(rng, width, height, rng.randint(1, 8))
    background = base.background
    image = Image.new("RGB", (width, height), shade(background, base.paper))
    line = random_line(rng, image, random_text(rng), background, [])
    if line is None:
        return text_lesson(rng, width, height, num_asks)
    shapes = tuple(s for s in base.shapes if not _touches(s, line))
    if not shapes:
        return text_lesson(rng, width, height, num_asks)
    scene = Scene(width, height, background, shapes, base.paper)
    drawn = scene.draw()
    drawn.paste(image.crop((line.left, line.top, line.right, line.bottom)), (line.left, line.top))
    # Of an empty place nothing is asked: the text may lie there.
    about_shapes = [ask for ask in ask_about(rng, scene, num_asks) if ask.answer != "Nothing." and not _is_of_text(ask)]
    about_shapes = [_with_text(ask, line) for ask in about_shapes]
    asks = _read_one(rng, line)[:2] + about_shapes
    rng.shuffle(asks)
    return Lesson((drawn,), tuple(asks[:num_asks]))


def _is_of_text(ask: Ask) -> bool:
    """Whether it asks for the text, or the number, that other scenes do not have."""
    return ask.kind == "refusal" and any(word in ask.question for word in ("say", "text", "written", "number"))


def _with_text(ask: Ask, line: Line) -> Ask:
    """What is said of the whole image goes on to the text."""
    if ask.kind != "describe" or (
        " at " not in ask.answer and " in the " not in ask.answer and " on the " not in ask.answer
    ):
        return ask
    return Ask(ask.kind, ask.question, f'{ask.answer} The text says "{line.text}".')


def _touches(shape: Shape, line: Line) -> bool:
    return (
        shape.x + shape.radius > line.left - 3
        and shape.x - shape.radius < line.right + 3
        and shape.y + shape.radius > line.top - 3
        and shape.y - shape.radius < line.bottom + 3
    )


def _read_one(rng: Random, line: Line) -> list[Ask]:
    said = f'It says "{line.text}".'
    asks = [
        Ask("read", any_of(rng, "What does it say?", "What is written here?", "What does the text say?",
                           "What does the sign say?", "What text do you see?", "What word is written?",
                           "Which word do you see?", "What does this say?"), said),
        Ask("read", any_of(rng, "Read the text.", "Read it.", "Read the word in the picture.", "What is the text?",
                           "Transcribe the text."), line.text),
    ]  # fmt: skip
    rng.shuffle(asks)
    if is_number(line.text):
        asks.insert(0, Ask("read", any_of(rng, "What number is shown?", "Which number do you see?", "Read the number."),
                           line.text))  # fmt: skip
    asks.append(_colour_of(rng, line))
    return asks


def _other_asks(rng: Random, lines: list[Line], background: str) -> list[Ask]:
    """What is not reading."""
    texts = [f'"{line.text}"' for line in sorted(lines, key=lambda line: line.top + line.bottom)]
    asks = [
        Ask("describe", describing(rng), f"The text {texts[0]}." if len(texts) == 1 else f"{len(texts)} texts."),
        Ask("colour", f"What {any_of(rng, 'colour', 'color')} is the background?", f"The background is {background}."),
        Ask("count", "How many shapes are there?", "There are no shapes."),
        Ask("colour", any_of(rng, "Is there any text?", "Is there a word?", "Do you see any text?"), "Yes."),
    ]
    return rng.sample(asks, 2)


def _read_some(rng: Random, lines: list[Line]) -> list[Ask]:
    """Each text by what tells it apart, and all of them from top to bottom."""
    asks = []
    by_height = sorted(lines, key=lambda line: line.top + line.bottom)
    colours = [line.colour for line in lines]
    for line in lines:
        if colours.count(line.colour) == 1:
            question = any_of(
                rng,
                f"What does the {line.colour} text say?",
                f"What is written in {line.colour}?",
                f"Read the {line.colour} text.",
            )
            asks.append(Ask("read", question, f'It says "{line.text}".'))
    for words, line, other in (
        ("top", by_height[0], by_height[1]),
        ("bottom", by_height[-1], by_height[-2]),
    ):
        if abs((line.top + line.bottom) - (other.top + other.bottom)) > 40:
            question = any_of(
                rng, f"What does the {words} text say?", f"Read the {words} line.", f"What is written at the {words}?"
            )
            asks.append(Ask("read", question, f'It says "{line.text}".'))
    if len(lines) <= 3 and len({line.text for line in lines}) == len(lines):
        gaps = [b.top + b.bottom - a.top - a.bottom for a, b in pairwise(by_height)]
        if min(gaps) > 30:
            question = any_of(rng, "Read all the text.", "What does it say?", "What is written here?", "Read the text.")
            quoted = [f'"{line.text}"' for line in by_height]
            asks.append(Ask("read", question, f"It says {joined(quoted)}."))
    question = any_of(rng, "How many texts are there?", "How many words are there?", "How many words do you see?")
    asks.append(Ask("count", question, f"There are {len(lines)}."))
    return asks


def _find(rng: Random, lines: list[Line]) -> list[Ask]:
    """Whether a text is there, and which: the other way round from reading it."""
    texts = {line.text for line in lines}
    line, other = rng.choice(lines), random_text(rng)
    while other.lower() in {text.lower() for text in texts}:
        other = random_text(rng)
    asks = []
    for text, answer in ((line.text, "Yes."), (other, "No.")):
        question = any_of(
            rng, f'Does it say "{text}"?', f'Is "{text}" written there?', f'Do you see the text "{text}"?'
        )
        asks.append(Ask("find", question, answer))
    if len(lines) > 1 and len(texts) == len(lines):
        for one in lines:
            word = any_of(rng, "colour", "color")
            question = any_of(rng, f'What {word} is the text "{one.text}"?', f'What {word} is "{one.text}"?')
            asks.append(Ask("find", question, f"The text is {one.colour}."))
    rng.shuffle(asks)
    return asks


def _colour_of(rng: Random, line: Line) -> Ask:
    word = any_of(rng, "colour", "color")
    question = any_of(rng, f"What {word} is the text?", f"Which {word} is the text?", f"What {word} is the word?")
    return Ask("colour", question, f"The text is {line.colour}.")


def _refuse(rng: Random, lines: list[Line]) -> Ask:
    absent = [colour for colour in COLOURS if colour not in {line.colour for line in lines}]
    kind, word = rng.choice(KINDS), any_of(rng, "colour", "color")
    question = any_of(
        rng,
        f"What {word} is the {kind}?",
        f"Where is the {kind}?",
        f"What does the {rng.choice(absent)} text say?",
        f"What is written in {rng.choice(absent)}?",
        "Which bar is the tallest?",
        f"What is the value of {rng.choice('ABCDEF')}?",
    )
    return Ask("refusal", question, CANNOT_SEE)
