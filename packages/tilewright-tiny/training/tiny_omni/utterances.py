"""What is said: sentences, and for questions and commands the answer that follows from their words alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from random import Random

from training.tiny_omni import words
from training.tiny_omni.words import VOCABULARY, number_words
from training.tiny_vl.lesson import Ask, any_of, joined, sentence, with_article

SETS = {"test": 0, "validation": 1}  # the remainder that the contents of a set have
MODULUS = 40
NUM_SAMPLES = 20_000  # sentences whose words are looked at: all of them come up many times in as many

TRANSCRIBE = (
    "Transcribe the audio.",
    "Transcribe the audio into text.",
    "Transcribe the English audio into text.",
    "Translate the speech in the audio into English text.",
    "Transcribe this.",
    "Please transcribe the audio.",
    "Write down what you hear.",
    "What is said?",
    "What do you hear?",
)
ANSWER = ("", "", "Answer the question.", "Answer.", "What is the answer?", "Do what is said.", "Reply to the audio.")


@dataclass(frozen=True)
class Utterance:
    """A sentence in lower case, and what may be asked of it."""

    kind: str
    text: str
    answer: str | None  # in as few words as may be; None: it is no question, and is only written down
    content: str  # what is said, whatever the wording: no two sets share one
    is_question: bool

    @property
    def set_name(self) -> str:
        if " " not in self.content:  # a word by itself: who has not learned it cannot write it
            return "training"
        digest = hashlib.sha256(self.content.encode()).digest()
        remainder = int.from_bytes(digest[:4], "little") % MODULUS
        return next((name for name, value in SETS.items() if value == remainder), "training")

    @property
    def transcript(self) -> str:
        return f"{sentence(self.text)[:-1]}{'?' if self.is_question else '.'}"

    @property
    def reply(self) -> str | None:
        """The answer as a sentence. It begins with one of a few words, and a voice that says it is understood."""
        return None if self.answer is None else sentence(REPLIES[self.kind](self.text, self.answer))

    def asks(self, rng: Random) -> list[Ask]:
        """Both tasks, or the one there is."""
        found = [Ask(f"hear {self.kind}", any_of(rng, *TRANSCRIBE), self.transcript)]
        if self.reply is not None:
            found.append(Ask(f"answer {self.kind}", any_of(rng, *ANSWER), self.reply))
        return found


def utterances(rng: Random, set_name: str = "training") -> Iterator[Utterance]:
    """Those of one set, without end."""
    while True:
        utterance = random_utterance(rng)
        if utterance.set_name == set_name:
            yield utterance


def random_utterance(rng: Random) -> Utterance:
    """One of any set."""
    makers, weights = zip(*KINDS.items(), strict=True)
    make = rng.choices(makers, weights)[0]
    said, answer, content = make(rng)
    is_question = make in QUESTIONS or said.startswith(("what", "which", "how", "can", "could"))
    return Utterance(make.__name__.lstrip("_"), said, answer, content, is_question)


_Made = tuple[str, str | None, str]  # the sentence, its answer, its content


def _digits(rng: Random) -> _Made:
    said = " ".join(rng.choice(words.DIGITS) for _ in range(rng.choice((1, 3, 3, 4, 4, 5, 6, 7))))
    return said, None, said


def _number(rng: Random) -> _Made:
    number = rng.randrange(1000) if rng.random() < 0.8 else rng.randrange(100)
    return number_words(number, any_of(rng, "and", "and", "")), None, f"number {number}" if number > 99 else "number"


def _words(rng: Random) -> _Made:
    said = " ".join(rng.sample(VOCABULARY, rng.choice((1, 2, 2, 3, 3, 4, 5, 6))))
    return said, None, said


def _things(rng: Random) -> _Made:
    said = joined([_thing(rng) for _ in range(rng.choice((1, 2, 2, 3)))]).replace(",", "")
    return said, None, said


def _sum(rng: Random) -> _Made:
    way = rng.choice(("plus", "minus", "times"))
    if way == "plus":
        one, other = rng.randint(0, 20), rng.randint(0, 20)
        result = one + other
    elif way == "minus":
        one = rng.randint(0, 20)
        other = rng.randint(0, one)
        result = one - other
    else:
        one, other = rng.randint(0, 10), rng.randint(0, 10)
        result = one * other
    said = f"{_asking(rng)} {number_words(one)} {way} {number_words(other)}"
    return said, number_words(result), said


def _asking(rng: Random) -> str:
    return any_of(
        rng, "what is", "what is", "how much is", "tell me what is", "please tell me how much is", "so what is"
    )


def _bigger(rng: Random) -> _Made:
    one, other = rng.sample(range(100), 2)
    word = any_of(rng, "bigger", "smaller")
    pick = max(one, other) if word == "bigger" else min(one, other)
    said = f"{_which(rng)} is {word} {number_words(one)} or {number_words(other)}"
    return said, number_words(pick), f"{one} or {other}"


def _which(rng: Random) -> str:
    return any_of(rng, "which", "which one", "which number")


def _order(rng: Random) -> _Made:
    kind = rng.choice(tuple(words.KIND_OF))
    named = rng.sample(words.KIND_OF[kind], rng.choice((2, 2, 3)))
    place = any_of(rng, "first", "last")
    listing = " ".join(named[:-1]) + f" or {named[-1]}"
    said = f"{any_of(rng, 'which', 'what')} {kind} comes {place} {listing}"
    return said, named[0 if place == "first" else -1], listing


def _odd(rng: Random) -> _Made:
    """Which of two words is of a kind."""
    kind, other = rng.sample(sorted(words.KIND_OF), 2)
    pick = rng.choice([word for word in words.KIND_OF[kind] if word not in words.KIND_OF[other]])
    both = [pick, rng.choice([word for word in words.KIND_OF[other] if word not in words.KIND_OF[kind]])]
    rng.shuffle(both)
    article = with_article(kind)
    return f"which is {article} {both[0]} or {both[1]}", pick, f"{both[0]} or {both[1]}"


def _count(rng: Random) -> _Made:
    named = rng.sample(VOCABULARY, rng.randint(2, 6))
    listing = " ".join(named)
    opening = any_of(rng, "how many words do you hear", "how many words are these", "how many words are there")
    return f"{opening} {listing}", words.DIGITS[len(named)], listing


def _draw(rng: Random) -> _Made:
    what = joined([_thing(rng, **words.DRAWN) for _ in range(rng.choice((1, 1, 2)))])
    return f"{any_of(rng, 'draw', 'please draw', 'paint', 'show me', 'can you draw')} {what}", what, what


def _repeat(rng: Random) -> _Made:
    what = " ".join(rng.sample(words.REPEATED, rng.randint(1, 4)))
    return f"{any_of(rng, 'say', 'please say', 'repeat after me', 'repeat')} {what}", what, what


def _count_to(rng: Random) -> _Made:
    start, end = rng.randint(0, 6), rng.randint(3, 12)
    end = max(end, start + 1)
    said = f"{any_of(rng, 'count', 'please count')} from {number_words(start)} to {number_words(end)}"
    return said, " ".join(number_words(number) for number in range(start, end + 1)), said


def _switch(rng: Random) -> _Made:
    if rng.random() < 0.5:
        thing = rng.choice(tuple(words.SWITCHED))
        how = rng.choice(words.SWITCHED[thing])
        said = f"turn {how} the {thing}"
    else:
        thing, how = rng.choice(words.OPENED), any_of(rng, "open", "closed")
        said = f"{how.removesuffix('d') if how == 'closed' else how} the {thing}"
    said = f"{any_of(rng, '', 'please ', 'now ', 'can you ', 'could you please ')}{said}"
    return said, f"the {thing} is {how}", said


def _spell(rng: Random) -> _Made:
    word = rng.choice(words.SPELLED)
    said = f"{any_of(rng, 'how do you spell', 'spell', 'please spell', 'spell the word', 'how is it spelled')} {word}"
    return said, " ".join(word), said


def _fact(rng: Random) -> _Made:
    question, answer = rng.choice((_colour_of, _sound_of, _legs_of, _opposite_of, _next_day, _next_month))(rng)
    opening = any_of(rng, "", "", "tell me ", "please tell me ", "do you know ", "can you tell me ", "so ")
    return f"{opening}{question}", answer, f"{opening}{question}"


def _colour_of(rng: Random) -> tuple[str, str]:
    what, colour = rng.choice(sorted(words.COLOUR_OF.items()))
    return f"what colour is {what}", colour


def _sound_of(rng: Random) -> tuple[str, str]:
    animal, sound = rng.choice(sorted(words.SOUNDS.items()))
    return f"what does a {animal} say", sound


def _legs_of(rng: Random) -> tuple[str, str]:
    animal, count = rng.choice(sorted(words.LEGS.items()))
    return f"how many legs does a {animal} have", count


def _opposite_of(rng: Random) -> tuple[str, str]:
    pair = list(rng.choice(sorted(words.OPPOSITES.items())))
    rng.shuffle(pair)
    return f"what is the opposite of {pair[0]}", pair[1]


def _next_day(rng: Random) -> tuple[str, str]:
    return _neighbour(rng, "day", words.DAYS)


def _next_month(rng: Random) -> tuple[str, str]:
    return _neighbour(rng, "month", words.MONTHS)


def _neighbour(rng: Random, kind: str, names: tuple[str, ...]) -> tuple[str, str]:
    place = rng.randrange(len(names))
    if rng.random() < 0.5:
        return f"what {kind} comes after {names[place]}", names[(place + 1) % len(names)]
    return f"what {kind} comes before {names[place]}", names[place - 1]


def _thing(
    rng: Random,
    sizes: tuple[str, ...] = words.SIZES,
    colours: tuple[str, ...] = words.COLOURS,
    shapes: tuple[str, ...] = words.SHAPES,
) -> str:
    size = f"{rng.choice(sizes)} " if rng.random() < 0.3 else ""
    return with_article(f"{size}{rng.choice(colours)} {rng.choice(shapes)}")


KINDS: dict[Callable[[Random], _Made], float] = {
    _digits: 14, _number: 10, _words: 20, _things: 6, _sum: 10, _bigger: 7, _order: 6, _odd: 4, _count: 6, _draw: 6,
    _repeat: 6, _count_to: 2, _switch: 3, _spell: 2, _fact: 8,
}  # fmt: skip
QUESTIONS = (_sum, _bigger, _order, _odd, _count, _fact)


def _bigger_one(text: str, answer: str) -> str:
    """which is bigger two or six: the number six is bigger than two."""
    word, *both = re.findall(r" is (bigger|smaller) (.+) or (.+)", text)[0]
    return f"the number {answer} is {word} than {both[both[0] == answer]}"


def _in_order(text: str, answer: str) -> str:
    """which animal comes first cat or dog: the first animal is the cat."""
    kind, place = re.findall(r"^\w+ (\w+) comes (\w+)", text)[0]
    return f"the {place} {kind} is {_named(kind, answer)}"


def _of_a_kind(text: str, answer: str) -> str:
    """which is an animal cat or red: the animal of the two is the cat."""
    kind = text.split()[3]
    return f"the {kind} of the two is {_named(kind, answer)}"


def _named(kind: str, answer: str) -> str:
    return f"the {answer}" if kind in words.COUNTED else answer


def _fact_told(text: str, answer: str) -> str:
    for pattern, reply in FACTS_TOLD.items():
        if found := re.search(pattern, text):
            return reply.format(*(re.sub("^a ", "the ", group) for group in found.groups()), answer=answer)
    raise ValueError(f"no reply to {text!r}")


def _in_a_row(answer: str) -> str:
    return answer.replace(" ", ", ")


def _drawn(text: str, answer: str) -> str:
    """With a pause before the second: "heart and" is heard as "heartened"."""
    return re.sub(r"\ban?\b", "your", f"here is {answer}").replace(" and ", ", and ")


def _switched(text: str, answer: str) -> str:
    """the door is closed: the door is now closed."""
    return answer.replace(" is ", " is now ")


FACTS_TOLD = {
    "what colour is (.+)": "the colour of {0} is {answer}",
    "what does (.+) say": "{0} says {answer}",
    "how many legs does (.+) have": "{0} has {answer} legs",
    "what is the opposite of (.+)": "the word {answer} is the opposite of {0}",
    "what (.+) comes (after|before) (.+)": "the {0} {1} {2} is {answer}",
}
# A word by itself is heard as another that sounds alike (two: to, twelve: welled): what is before it tells what it is.
REPLIES: dict[str, Callable[[str, str], str]] = {
    "sum": lambda text, answer: f"the answer is the number {answer}",
    "bigger": _bigger_one,
    "order": _in_order,
    "odd": _of_a_kind,
    "count": lambda text, answer: f"there are {answer} words",
    "draw": _drawn,
    "repeat": lambda text, answer: f"you said {_in_a_row(answer)}",
    "count_to": lambda text, answer: f"the numbers are {_in_a_row(answer)}",
    "switch": _switched,
    "spell": lambda text, answer: f"the letters are {_in_a_row(answer)}",
    "fact": _fact_told,
}


@cache
def spoken_words() -> tuple[str, ...]:
    """All words of all sentences."""
    rng = Random("words")
    said = {word for _ in range(NUM_SAMPLES) for word in random_utterance(rng).text.split()}
    return tuple(sorted(said | set(VOCABULARY)))


def written_words() -> list[str]:
    """All words that follow a space in a prompt or an answer, letters that are spelled among them."""
    rng = Random("words")
    answers = [random_utterance(rng).answer or "" for _ in range(NUM_SAMPLES)]
    asked = {word for text in (*TRANSCRIBE, *ANSWER) for word in re.findall(r" ([A-Za-z]+)", text)}
    return sorted({word for text in answers for word in text.split()} | set(spoken_words()) | asked)
