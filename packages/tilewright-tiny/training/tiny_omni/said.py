"""What the voice says: answers as sentences, drills of the same sentences with other words, and some transcripts.

Sets are apart by the text itself: of no sentence of the test set has the voice been told how it sounds. Most kinds of
answers are few, and a voice that has only ever heard those knows no word from its neighbours: in drills any word that
could be said in a place is, whether that is true or not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from string import ascii_lowercase

from training.tiny_omni import words
from training.tiny_omni.speech import Voice
from training.tiny_omni.utterances import SETS, random_utterance
from training.tiny_omni.words import VOCABULARY, number_words
from training.tiny_vl.lesson import sentence

# By the name that requests call it. Of the synthesisers' voices, Whisper understands this one best.
VOICES = {"chelsie": Voice("flite", "slt", 130, 50, 50, 0)}
MODULUS = 12
# Shares of the sentences of training: drills, and what is written down and answers nothing. The others are answers.
DRILLS, TRANSCRIPTS = 0.6, 0.05


def set_of(text: str) -> str:
    """The set that a text belongs to."""
    remainder = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") % MODULUS
    return next((name for name, value in SETS.items() if value == remainder), "training")


def as_spoken(text: str) -> str:
    """As the synthesiser has to read it: flite knows American spellings, and the letter a as a letter in upper case."""
    text = text.replace("olour", "olor").replace("grey", "gray")
    return re.sub(r"\b[a-z](?=[,.])", lambda found: found[0].upper(), text)


def answers(set_name: str, count: int) -> list[str]:
    """The first answers of a set; no two are alike."""
    rng = Random(f"{set_name} said")
    return list(islice(_distinct(_answers(rng), set_name), count))


def sayings(rng: Random, set_name: str = "training") -> Iterator[str]:
    """Sentences of one set, no two alike, as long as there are any."""
    return _distinct(_sentences(rng), set_name)


def _answers(rng: Random) -> Iterator[str]:
    while True:
        if reply := random_utterance(rng).reply:
            yield reply


def _sentences(rng: Random) -> Iterator[str]:
    while True:
        way = rng.random()
        if way < DRILLS:
            yield sentence(rng.choice(_DRILLS)(rng))
            continue
        utterance = random_utterance(rng)
        if utterance.reply:
            yield utterance.reply
        elif way > 1 - TRANSCRIPTS:
            yield utterance.transcript


def _word(rng: Random) -> str:
    return rng.choice(VOCABULARY)


def _number(rng: Random) -> str:
    return number_words(rng.randrange(100))


def _row(rng: Random, choices: tuple[str, ...]) -> str:
    return ", ".join(rng.choice(choices) for _ in range(rng.choice((1, 1, 2, 2, 3, 4))))


def _count(rng: Random) -> str:
    start = rng.randrange(12)
    return ", ".join(map(number_words, range(start, start + rng.randint(2, 9))))


def _thing(rng: Random) -> str:
    size = f"{rng.choice(words.SIZES)} " if rng.random() < 0.3 else ""
    return f"your {size}{rng.choice(words.COLOURS)} {rng.choice(words.SHAPES)}"


def _of_kind(rng: Random, which: str = "") -> str:
    kind = rng.choice(tuple(words.KIND_OF))
    word = rng.choice(words.KIND_OF[kind]) if rng.random() < 0.6 else _word(rng)
    return f"{kind}{which} is {f'the {word}' if kind in words.COUNTED else word}"


def _neighbours(rng: Random) -> str:
    kind, names = rng.choice((("day", words.DAYS), ("month", words.MONTHS)))
    return f"the {kind} {rng.choice(('after', 'before'))} {rng.choice(names)} is {rng.choice(names)}"


def _opposite(rng: Random) -> str:
    one, other = (rng.choice((*words.OPPOSITES.keys(), *words.OPPOSITES.values())) for _ in range(2))
    return f"the word {one} is the opposite of {other}"


def _colour_of(rng: Random) -> str:
    what = rng.choice((*words.COLOUR_OF, _word(rng), f"the {_word(rng)}"))
    return f"the colour of {re.sub('^a ', 'the ', what)} is {rng.choice(words.COLOURS)}"


_LETTERS = tuple(ascii_lowercase)
_DRILLS: tuple[Callable[[Random], str], ...] = (
    lambda rng: f"the answer is the number {_number(rng)}",
    lambda rng: f"the number {_number(rng)} is {rng.choice(('bigger', 'smaller'))} than {_number(rng)}",
    lambda rng: f"the {rng.choice(('first', 'last'))} {_of_kind(rng)}",
    lambda rng: f"the {_of_kind(rng, ' of the two')}",
    lambda rng: f"there are {_number(rng)} words",
    lambda rng: f"here is {_thing(rng)}",
    lambda rng: f"here is {_thing(rng)}, and {_thing(rng)}",
    lambda rng: f"you said {_row(rng, VOCABULARY)}",
    lambda rng: f"you said {_row(rng, VOCABULARY)}",
    lambda rng: f"the numbers are {_count(rng)}",
    lambda rng: f"the numbers are {_row(rng, words.DIGITS + words.TEENS)}",
    lambda rng: f"the {_word(rng)} is now {rng.choice(('on', 'off', 'open', 'closed'))}",
    lambda rng: f"the letters are {_row(rng, _LETTERS)}, {_row(rng, _LETTERS)}",
    _neighbours,
    _opposite,
    _colour_of,
    lambda rng: f"the {rng.choice(words.ANIMALS)} says {rng.choice((*words.SOUNDS.values(), _word(rng)))}",
    lambda rng: f"the {rng.choice(words.ANIMALS)} has {rng.choice(words.DIGITS)} legs",
)


def _distinct(texts: Iterator[str], set_name: str) -> Iterator[str]:
    seen = set()
    for text in texts:
        if text not in seen and set_of(text) == set_name:
            seen.add(text)
            yield text
