"""Reads messages in OpenAI's form and their media; checks limits on their text before anything is tokenized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

from tilewright.inputs.chat_template import plain
from tilewright.inputs.media import (
    MediaLimits,
    MediaPart,
    check_count,
    check_total,
    num_frames_of_url,
    open_frames_url,
    open_url,
)
from tilewright.inputs.precomputed import TYPES, Precomputed, precomputed_of, type_of
from tilewright.types import MEDIA_KINDS, ContextLengthExceeded, MediaKind, Messages, RequestError

# Keys of qwen_vl_utils' parts: sizes and times of a single image or video.
UNSERVED_KEYS = (
    "min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width", "nframes", "min_frames",
    "max_frames", "video_start", "video_end",
)  # fmt: skip


def normalize(
    messages: Messages,
    *,
    limits: MediaLimits | None = None,
    accepts: Sequence[MediaKind] = MEDIA_KINDS,
    model: str = "the model",
    missing: str | None = None,
    use_audio_in_video: bool = False,
) -> tuple[list[dict[str, Any]], list[MediaPart]]:
    """Return messages for the template, with {"type": kind} for each medium, and the media in order.

    Parts are OpenAI's (text, image_url, video_url, input_audio) and {"type": "image", "image": source}, likewise for
    video and audio; a video may set its frames' "fps", and "use_audio_in_video" if it differs from the argument.
    Nothing is fetched here: an http(s) URL is refused. `missing` is the error for images and videos if the
    model lacks a component for them.
    """
    collected = _Media(limits or MediaLimits(), accepts, model, missing, use_audio_in_video)
    normalized = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise RequestError(f"a message is a {type(message).__name__}, expected an object with a role")
        rest = {key: plain(value) for key, value in message.items() if key != "content"}
        content = message.get("content")
        if isinstance(content, list | tuple):
            rest["content"] = [collected.add(part) for part in content]
        elif isinstance(content, str) or content is None:
            rest["content"] = content
        else:
            raise RequestError(f"content is a {type(content).__name__}, expected text or a list of parts")
        normalized.append(rest)
    return normalized, collected.parts


def media_of_prompt(
    media: Sequence[object],
    *,
    limits: MediaLimits | None = None,
    accepts: Sequence[MediaKind],
    model: str = "the model",
    missing: str | None = None,
) -> list[MediaPart]:
    """Return the media of a prompt, which have the form of message parts."""
    collected = _Media(limits or MediaLimits(), accepts, model, missing, use_audio_in_video=False)
    for part in media:
        if collected.add(part)["type"] == "text":
            raise RequestError('media has an item of text, expected {"type": "image", "image": source} or the like')
    return collected.parts


class _Media:
    """The media of a request, collected part by part within its limits."""

    def __init__(
        self,
        limits: MediaLimits,
        accepts: Sequence[MediaKind],
        model: str,
        missing: str | None,
        use_audio_in_video: bool,
    ) -> None:
        self._limits = limits
        self._accepts = accepts
        self._model = model
        self._missing = missing
        self._use_audio_in_video = use_audio_in_video
        self._total_bytes = 0
        self.parts: list[MediaPart] = []

    def add(self, part: object) -> dict[str, Any]:
        """Return the part in the form that templates read; append a medium to `parts`."""
        if isinstance(part, str):
            return {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise RequestError(f"a part of a message is a {type(part).__name__}, expected an object with a type")
        found = source_of(part)
        if found is None:
            found = self._precomputed(part)
        if found is None:
            return {"type": "text", "text": _text_of(part)}
        kind, source, is_url = found
        name = self._name(kind)
        if unserved := [key for key in UNSERVED_KEYS if part.get(key) is not None]:
            raise RequestError(f"{name}: {unserved[0]} is given: media are prepared as the checkpoint says")
        if kind not in self._accepts:
            if self._missing is not None and kind in ("image", "video"):
                raise RequestError(f"{name}: {self._missing}")
            accepted = " and ".join(("text", *self._accepts)) if self._accepts else "text only"
            raise RequestError(f"{name}: {self._model} accepts {accepted}")
        check_count(len(self.parts) + 1, name, self._limits)
        if is_url:
            source = self._open(kind, source, name)
        self._total_bytes += _num_bytes(source) if is_url or isinstance(source, bytes | Precomputed) else 0
        check_total(self._total_bytes, name, self._limits)
        fps = part.get("fps")
        if fps is not None and (not isinstance(fps, int | float) or not 0 < fps <= 1000):
            raise RequestError(f"{name}: fps is {fps!r}, expected more than 0, at most 1000")
        with_sound = kind == "video" and self._is_heard(part, name)
        self.parts.append(MediaPart(kind, name, source, None if fps is None else float(fps), with_sound))
        return {"type": kind}

    def _name(self, kind: MediaKind) -> str:
        """Return the name of the next medium of this kind, for errors."""
        return f"{kind} {1 + sum(medium.kind == kind for medium in self.parts)}"

    def _precomputed(self, part: Mapping[str, Any]) -> tuple[MediaKind, Any, bool] | None:
        """Return the result of `source_of` for a part with precomputed values; None for other parts."""
        value_type = type_of(part)
        if value_type is None:
            return None
        kind = TYPES[value_type].kind
        return kind, precomputed_of(part, self._name(kind), self._limits), False

    def _is_heard(self, part: Mapping[str, Any], name: str) -> bool:
        """Return whether a video's sound is read with its frames."""
        wanted = part.get("use_audio_in_video", self._use_audio_in_video)
        if not isinstance(wanted, bool):
            raise RequestError(f"{name}: use_audio_in_video is {wanted!r:.60}, expected true or false")
        if wanted and "audio" not in self._accepts:
            raise RequestError(f"{name}: use_audio_in_video is true, but {self._model} accepts no sound")
        return wanted

    def _open(self, kind: MediaKind, url: str, name: str) -> bytes | list[bytes]:
        """Return the bytes of a URL, or the frames of a video URL that contains them."""
        if kind == "video" and num_frames_of_url(url):
            return open_frames_url(url, name, self._limits)
        return open_url(url, name, self._limits)


def _num_bytes(source: bytes | list[bytes] | Precomputed) -> int:
    if isinstance(source, Precomputed):
        return source.size_bytes
    return len(source) if isinstance(source, bytes) else sum(map(len, source))


def _text_of(part: Mapping[str, Any]) -> str:
    """Return the text of a text part; raise RequestError for unknown types, which templates would ignore."""
    kind = part.get("type", "text")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in ("text", "refusal") or any(key in part for key in ("image", "video", "audio", "image_url", "file")):
        raise RequestError(f"a part of a message is of type {kind!r:.60}, expected text, an image, a video or a sound")
    if not isinstance(text, str):
        raise RequestError(f"a part of type {kind} has {text!r:.60}, expected text")
    return text


def has_media(messages: Messages) -> bool:
    """Return whether a part of a message may be other than text."""
    contents = [message.get("content") if isinstance(message, Mapping) else None for message in messages]
    return any(
        not isinstance(part, str) and not (isinstance(part, Mapping) and part.get("type") == "text")
        for content in contents
        if isinstance(content, list | tuple)
        for part in content
    )


def source_of(part: Mapping[str, Any]) -> tuple[MediaKind, Any, bool] | None:
    """Return (kind, source, whether it must be a URL) of a medium; None for other parts."""
    for kind in MEDIA_KINDS:
        if part.get("type") == f"{kind}_url" or (part.get("type") is None and f"{kind}_url" in part):
            value = part.get(f"{kind}_url")
            url = value.get("url") if isinstance(value, Mapping) else value
            if not isinstance(url, str):
                raise RequestError(f'{kind}_url is {value!r:.100}, expected {{"url": ...}}')
            return kind, url, True
        if part.get("type") == kind or (part.get("type") is None and kind in part):
            if part.get(kind) is None:
                raise RequestError(f'a part of type {kind} has no "{kind}"')
            return kind, part[kind], False
    if part.get("type") == "input_audio":
        value = part.get("input_audio")
        if not isinstance(value, Mapping) or not isinstance(value.get("data"), str):
            raise RequestError('input_audio is expected to be {"data": base64, "format": ...}')
        return "audio", f"data:audio/{value.get('format', 'wav')};base64,{value['data']}", True
    return None


# A template takes 60 us per message and 15 us per part: 0.25 s and 0.4 s at these limits, during which other threads
# get the interpreter only in turns.
MAX_MESSAGES = 4096
MAX_VALUES = 1 << 16  # strings, numbers, lists and objects of messages, tools and template arguments


class TooManyItems(RequestError):
    """A list of a request is longer than the limit."""

    code = "array_above_max_length"  # OpenAI's name


@dataclass(frozen=True)
class TextLimits:
    """Limits on text from a context of max_context tokens of at most max_token_bytes each."""

    max_context: int
    max_token_bytes: int

    @property
    def max_characters(self) -> int:
        """The most characters that may fit: a character has at least one byte, a token at most max_token_bytes."""
        return self.max_context * self.max_token_bytes

    def check_text(self, text: str) -> int:
        """Return the text's number of characters; raise ContextLengthExceeded if they cannot fit the context."""
        if len(text) > self.max_characters:
            raise self._too_long(f"your prompt has {len(text)} characters")
        return len(text)

    def check_prompt(self, text: str | None, token_ids: Sequence[int] | None) -> int:
        """Return a prompt's number of characters (0 for ids); raise ContextLengthExceeded if it cannot fit."""
        if token_ids is not None and len(token_ids) > self.max_context:
            raise ContextLengthExceeded(self.max_context, f"your prompt resulted in {len(token_ids)} tokens")
        return 0 if text is None else self.check_text(text)

    def check_chat(self, messages: Messages, tools: Sequence[object] | None, template_args: object) -> int:
        """Return a conversation's number of characters; raise RequestError for too many characters, messages or values.

        Media are not counted.
        """
        if len(messages) > MAX_MESSAGES:
            raise TooManyItems(f"messages has {len(messages)} entries, the limit is {MAX_MESSAGES}")
        num_values = num_characters = 0
        pending: list[object] = [tools, template_args, *(value for item in messages for value in _texts_of(item))]
        while pending:
            value = pending.pop()
            num_values += 1
            if isinstance(value, str):
                num_characters += len(value)
            elif isinstance(value, Mapping):
                pending += value.keys()
                pending += value.values()
            elif isinstance(value, list | tuple):
                pending += value
            if num_values + len(pending) > MAX_VALUES:
                raise TooManyItems(
                    f"messages, tools and template arguments have more than {MAX_VALUES} keys and values, the limit"
                )
            if num_characters > self.max_characters:
                raise self._too_long(
                    f"your messages, tools and template arguments have {num_characters} characters or more"
                )
        return num_characters

    def _too_long(self, what: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            self.max_context,
            f"{what}, and {self.max_context} tokens hold {self.max_characters} at most: the longest token has "
            f"{self.max_token_bytes} bytes",
        )


@dataclass(frozen=True)
class TextBudget:
    """The limits of a request during preparation, and whether it was cancelled."""

    limits: TextLimits
    is_cancelled: Callable[[], bool] = lambda: False

    def check_cancelled(self) -> None:
        if self.is_cancelled():
            raise CancelledError


def _texts_of(message: object) -> list[object]:
    """Return the values of a message without its media."""
    if not isinstance(message, Mapping) or not isinstance(content := message.get("content"), list | tuple):
        return [message]
    return [{**message, "content": None}, *(part for part in content if not _is_medium(part))]


def _is_medium(part: object) -> bool:
    try:
        return isinstance(part, Mapping) and (type_of(part) is not None or source_of(part) is not None)
    except RequestError:  # `normalize` raises it again, with the item's name
        return False
