"""Messages as clients send them: parts of several APIs in one form, and the media among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.inputs.chat_template import plain
from tilewright.inputs.media import (
    Fetch,
    MediaLimits,
    MediaPart,
    check_count,
    check_total,
    num_frames_of_url,
    open_frames_url,
    open_url,
)
from tilewright.types import MediaKind, Messages, RequestError

# Of qwen_vl_utils' parts: sizes and times that each picture or video would have for itself.
_UNSERVED_KEYS = (
    "min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width", "nframes", "min_frames",
    "max_frames", "video_start", "video_end",
)  # fmt: skip


def normalize(
    messages: Messages,
    *,
    limits: MediaLimits | None = None,
    fetch: Fetch | None = None,
    accepts: Sequence[MediaKind] = ("image", "video", "audio"),
    model: str = "the model",
) -> tuple[list[dict[str, Any]], list[MediaPart]]:
    """Messages for the template, in which a medium is {"type": its kind}, and the media in the order of the messages.

    Takes OpenAI's parts (text, image_url, video_url, input_audio) and {"type": "image", "image": source}, video and
    audio alike; a video may say its frames' "fps". Nothing is fetched here: `fetch` turns an http(s) URL into bytes.
    """
    limits = limits or MediaLimits()
    media: list[MediaPart] = []
    total_bytes = 0

    def take(part: object) -> dict[str, Any]:
        nonlocal total_bytes
        if isinstance(part, str):
            return {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise RequestError(f"a part of a message is a {type(part).__name__}, expected an object with a type")
        found = source_of(part)
        if found is None:
            return {"type": "text", "text": _text_of(part)}
        kind, source, is_url = found
        name = f"{kind} {1 + sum(medium.kind == kind for medium in media)}"
        if unserved := [key for key in _UNSERVED_KEYS if part.get(key) is not None]:
            raise RequestError(f"{name}: {unserved[0]} is given: media are prepared as the checkpoint says")
        if kind not in accepts:
            raise RequestError(f"{name}: {model} takes {' and '.join(('text', *accepts)) if accepts else 'text alone'}")
        check_count(len(media) + 1, name, limits)
        if is_url and kind == "video" and num_frames_of_url(source):
            source = open_frames_url(source, name, limits)
            total_bytes += sum(map(len, source))
        elif is_url:
            source = open_url(source, name, limits, fetch)
        total_bytes += len(source) if isinstance(source, bytes) else 0
        check_total(total_bytes, name, limits)
        fps = part.get("fps")
        if fps is not None and (not isinstance(fps, int | float) or not 0 < fps <= 1000):
            raise RequestError(f"{name}: fps is {fps!r}, expected more than 0, at most 1000")
        media.append(MediaPart(kind, name, source, None if fps is None else float(fps)))
        return {"type": kind}

    normalized = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise RequestError(f"a message is a {type(message).__name__}, expected an object with a role")
        rest = {key: plain(value) for key, value in message.items() if key != "content"}
        content = message.get("content")
        if isinstance(content, list | tuple):
            rest["content"] = [take(part) for part in content]
        elif isinstance(content, str) or content is None:
            rest["content"] = content
        else:
            raise RequestError(f"content is a {type(content).__name__}, expected text or a list of parts")
        normalized.append(rest)
    return normalized, media


def _text_of(part: Mapping[str, Any]) -> str:
    """The text of a part that is no medium; RequestError for one of another type, which templates would pass over."""
    kind = part.get("type", "text")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in ("text", "refusal") or any(key in part for key in ("image", "video", "audio", "image_url", "file")):
        raise RequestError(f"a part of a message is of type {kind!r:.60}, expected text, a picture, a video or a sound")
    if not isinstance(text, str):
        raise RequestError(f"a part of type {kind} has {text!r:.60}, expected text")
    return text


def has_media(messages: Messages) -> bool:
    """Whether a part of some message may be other than text."""
    contents = [message.get("content") if isinstance(message, Mapping) else None for message in messages]
    return any(
        not isinstance(part, str) and not (isinstance(part, Mapping) and part.get("type") == "text")
        for content in contents
        if isinstance(content, list | tuple)
        for part in content
    )


def source_of(part: Mapping[str, Any]) -> tuple[MediaKind, Any, bool] | None:
    """(kind, source, whether it must be a URL) of a part that is a medium."""
    kinds: tuple[MediaKind, ...] = ("image", "video", "audio")
    for kind in kinds:
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
