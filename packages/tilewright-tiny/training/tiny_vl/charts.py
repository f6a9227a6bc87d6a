"""Simple bar charts, and what is asked about them."""

from __future__ import annotations

from random import Random

from PIL import Image, ImageDraw

from training.tiny_vl.lesson import CANNOT_SEE, Ask, Lesson, any_of, describing
from training.tiny_vl.lettering import font, font_paths, letter_mask
from training.tiny_vl.shapes import COLOURS, jitter, shade
from training.tiny_vl.words import LETTERS, SHORT_WORDS

HIGHEST = 10
NARROW = 224  # pixels: words below the bars of a narrower chart would be too small to read
BAR_COLOURS = [colour for colour in COLOURS if colour not in ("white", "black", "grey")]


def chart_lesson(rng: Random, width: int, height: int, num_asks: int) -> Lesson:
    num_bars = rng.randint(2, 5)
    labels, values = _labels(rng, width, num_bars), _values(rng, num_bars)
    colours = [rng.choice(BAR_COLOURS)] * num_bars if rng.random() < 0.4 else rng.sample(BAR_COLOURS, num_bars)
    image = _draw(rng, width, height, labels, values, colours)
    asks = _asks(rng, labels, values, colours)
    rng.shuffle(asks)
    return Lesson((image,), tuple(asks[:num_asks]))


def _labels(rng: Random, width: int, count: int) -> list[str]:
    """Words mostly; letters in any order, which teach to look a bar up by what is below it; or A, B, C."""
    way = rng.random() * (0.4 if width < NARROW else 1.0)
    if way < 0.15:
        return list(LETTERS[:count])
    return rng.sample(LETTERS if way < 0.4 else SHORT_WORDS, count)


def _values(rng: Random, count: int) -> list[int]:
    """With one highest and one lowest."""
    while True:
        values = [rng.randint(1, HIGHEST) for _ in range(count)]
        ordered = sorted(values)
        if ordered[0] < ordered[1] and ordered[-1] > ordered[-2]:
            return values


def _draw(
    rng: Random, width: int, height: int, labels: list[str], values: list[int], colours: list[str]
) -> Image.Image:
    image = Image.new("RGB", (width, height), shade("white", jitter(rng)))
    pen = ImageDraw.Draw(image)
    path = rng.choice(font_paths())
    left, right, top, bottom = 34, width - 8, rng.randint(22, 34), height - 34
    step = (bottom - top) / HIGHEST
    small = font(path, 17)
    spacing = rng.choice((1, 2, 2, 5))
    for tick in range(0, HIGHEST + 1, spacing):
        y = round(bottom - tick * step)
        pen.line((left, y, right, y), fill=(205, 205, 205), width=1)
        if spacing > 1 or tick % 2 == 0:
            pen.text((left - 5, y), str(tick), fill=(40, 40, 40), font=small, anchor="rm")
    pen.line((left, top - 6, left, bottom), fill=(30, 30, 30), width=2)
    slot = (right - left) / len(labels)
    bar_width = slot * rng.uniform(0.5, 0.75)
    shows_values = rng.random() < 0.35
    for index, (label, value, colour) in enumerate(zip(labels, values, colours, strict=True)):
        middle = left + slot * (index + 0.5)
        y = round(bottom - value * step)
        pen.rectangle(
            (round(middle - bar_width / 2), y, round(middle + bar_width / 2), bottom), fill=shade(colour, jitter(rng))
        )
        size = 22 if len(label) == 1 else 20
        length = font(path, size).getlength(label)
        mask = letter_mask(label, path, size if length < slot - 3 else int(size * (slot - 3) / length), 0)
        image.paste((20, 20, 20), (round(middle - mask.width / 2), bottom + 16 - mask.height // 2), mask)
        if shows_values:
            pen.text((middle, y - 2), str(value), fill=(20, 20, 20), font=small, anchor="mb")
    pen.line((left, bottom, right, bottom), fill=(30, 30, 30), width=2)
    return image


def _asks(rng: Random, labels: list[str], values: list[int], colours: list[str]) -> list[Ask]:
    word = any_of(rng, "colour", "color")
    tallest, shortest = labels[values.index(max(values))], labels[values.index(min(values))]
    asks = [
        Ask("chart", any_of(rng, "Which bar is the tallest?", "Which bar is tallest?", "Which is the tallest bar?",
                            "Which bar is the highest?"), f'The bar "{tallest}" is the tallest.'),
        Ask("chart", any_of(rng, "Which bar is the shortest?", "Which bar is shortest?", "Which is the shortest bar?",
                            "Which bar is the lowest?"), f'The bar "{shortest}" is the shortest.'),
        Ask("chart", any_of(rng, "How many bars are there?", "How many bars do you see?", "Count the bars."),
            f"There are {len(labels)} bars."),
        Ask("chart", any_of(rng, "What is the highest value?", "What is the largest value?"), str(max(values))),
        Ask("describe", any_of(rng, describing(rng), describing(rng), "What kind of picture is this?"),
            f"A bar chart with {len(labels)} bars."),
    ]  # fmt: skip
    # Finding a bar by a word below it is learned last of all and suddenly, so every bar is asked for.
    for index in range(len(labels)):
        name = _named(rng, labels[index])
        asks.append(Ask("chart", any_of(rng, *_value_questions(name)), str(values[index])))
    if len(set(colours)) > 1:
        for index in range(len(labels)):
            name = _named(rng, labels[index])
            asks.append(Ask("chart", f"What {word} is the bar {name}?", f"The bar is {colours[index]}."))
        index = rng.randrange(len(labels))
        question = any_of(rng, f"Which bar is {colours[index]}?", f"What is the label of the {colours[index]} bar?")
        asks.append(Ask("chart", question, f'The bar "{labels[index]}" is {colours[index]}.'))
    asks.append(_refuse(rng, labels))
    return asks


def _named(rng: Random, label: str) -> str:
    return any_of(rng, label, f'"{label}"')


def _value_questions(name: str) -> tuple[str, ...]:
    return (
        f"What is the value of {name}?",
        f"What value does {name} have?",
        f"How high is the bar {name}?",
        f"What is the value of the bar {name}?",
    )


def _refuse(rng: Random, labels: list[str]) -> Ask:
    pool = LETTERS if len(labels[0]) == 1 else SHORT_WORDS
    absent = rng.choice([label for label in pool if label not in labels])
    name = _named(rng, absent)
    question = any_of(
        rng,
        *_value_questions(name),
        f"What {any_of(rng, 'colour', 'color')} is the {any_of(rng, 'star', 'circle', 'heart', 'cross')}?",
        f"Where is the {any_of(rng, 'star', 'circle', 'heart', 'triangle')}?",
    )
    return Ask("refusal", question, CANNOT_SEE)
