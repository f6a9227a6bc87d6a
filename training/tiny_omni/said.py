"""What the voice says: answers and transcripts of the sets, and how a synthesiser is told to say them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from training.tiny_omni.speech import Voice
from training.tiny_omni.utterances import Utterance, utterances
from training.tiny_vl.lesson import sentence

# By the name that requests call it. Of the synthesisers' voices, Whisper understands this one best.
VOICES = {"chelsie": Voice("flite", "slt", 160, 50, 50, 0)}
# Kinds whose transcripts, and kinds whose answers, are words in a row: between them there are pauses.
LISTED_TRANSCRIPTS = frozenset(("digits", "words"))
LISTED_ANSWERS = frozenset(("repeat", "count_to", "spell"))


@dataclass(frozen=True)
class Said:
    """A text as it is written, and as a synthesiser reads it."""

    text: str
    spoken: str


def answers(set_name: str, count: int) -> Iterator[Said]:
    """The first answers to questions and commands of a set, each from a seed of its own."""
    for index in range(count):
        rng = Random(f"{set_name} {index} said")
        yield next(answer_of(utterance) for utterance in utterances(rng, set_name) if utterance.answer)


def sayings(rng: Random, set_name: str = "training") -> Iterator[Said]:
    """Answers and transcripts of one set, without end."""
    for utterance in utterances(rng, set_name):
        if utterance.answer:
            yield answer_of(utterance)
        if not utterance.answer or rng.random() < 0.5:
            yield transcript_of(utterance)


def answer_of(utterance: Utterance) -> Said:
    text = sentence(utterance.answer or "")
    return Said(text, _with_pauses(text) if utterance.kind in LISTED_ANSWERS else text)


def transcript_of(utterance: Utterance) -> Said:
    text = utterance.transcript
    return Said(text, _with_pauses(text) if utterance.kind in LISTED_TRANSCRIPTS else text)


def _with_pauses(text: str) -> str:
    return text.replace(" ", ", ")
