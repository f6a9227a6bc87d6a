"""The names of a model's voices, and OpenAI's names for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.types import RequestError

# Applications written for OpenAI's models name these. Their order decides which voice a name means, so append only.
OPENAI_VOICES = (
    "alloy", "ash", "ballad", "coral", "echo", "fable", "nova", "onyx", "sage", "shimmer", "verse", "marin", "cedar",
)  # fmt: skip


def voice_aliases(voices: Sequence[str]) -> Mapping[str, str]:
    """Return OpenAI's names that no voice of the model has, each with the voice it means: the model's, in turn."""
    if not voices:
        return {}
    own = {voice.lower() for voice in voices}
    return {name: voices[i % len(voices)] for i, name in enumerate(OPENAI_VOICES) if name not in own}


def find_voice(name: str, voices: Sequence[str]) -> str:
    """Return the model's voice that a request names; RequestError with the list where there is no such voice."""
    aliases = voice_aliases(voices)
    found = {**aliases, **{voice.lower(): voice for voice in voices}}.get(name.lower())
    if found is None:
        message = f"voice is {name!r:.100}, expected one of {', '.join(voices)}, or a name of OpenAI's for one of them"
        raise RequestError(f"{message}: {', '.join(aliases)}", param="voice")
    return found
