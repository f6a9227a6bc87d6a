"""Messages to the text a model was trained on: the checkpoint's own template, run in a sandbox."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.inputs.cut_json import whole_part
from tilewright.inputs.media import (
    Fetch,
    MediaKind,
    MediaLimits,
    MediaPart,
    check_count,
    check_total,
    num_frames_of_url,
    open_frames_url,
    open_url,
)
from tilewright.model_files import CheckpointError, read_json
from tilewright.types import REASONING_TAGS, Messages, RequestError

if TYPE_CHECKING:
    import jinja2

# Of qwen_vl_utils' parts: sizes and times that each picture or video would have for itself.
_UNSERVED_KEYS = (
    "min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width", "nframes", "min_frames",
    "max_frames", "video_start", "video_end",
)  # fmt: skip
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A chat template, compiled when first used.

    `source` is the template, or templates by name: "tool_use" is taken when tools are given, else "default".
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        allow_special_tokens: bool = False,  # whether those in the text of messages are such, and not plain text
    ) -> None:
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        if not self.sources:
            raise ValueError("a chat template needs a source")
        self.special_tokens = dict(special_tokens)
        self.allow_special_tokens = allow_special_tokens

    def render(
        self, messages: Messages, *, tools: Sequence[object] | None = None, add_generation_prompt: bool = True,
        **template_args: object,
    ) -> str:  # fmt: skip
        """The prompt's text. An error the template raises is a `RequestError` with its message."""
        given = self.given(messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_args)
        return self.run(given)

    def given(
        self, messages: Messages, *, tools: Sequence[object] | None = None, **template_args: object
    ) -> dict[str, Any]:
        """What a request gives the template, by the names it uses: JSON's types alone, fitted to it."""
        source = self.sources[self._choose(bool(tools))]
        return {
            **{key: plain(value) for key, value in template_args.items()},
            "messages": [_fit(message, source) for message in messages],
            "tools": plain(list(tools)) if tools else None,
        }

    def run(self, given: Mapping[str, Any]) -> str:
        """The text that the template makes of what `given` gave, up to where the model answers unless that says no."""
        from jinja2.exceptions import TemplateError

        name = self._choose(bool(given["tools"]))
        try:
            return self._compiled[name].render({**self.special_tokens, "add_generation_prompt": True, **given})
        except TemplateError as error:
            raise RequestError(f"the chat template refused the messages: {error.message or error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError, OverflowError) as error:
            # What a template runs into when a message is not of the form it expects.
            raise RequestError(f"the chat template cannot take the messages: {error}") from error

    def _choose(self, has_tools: bool) -> str:
        if has_tools and "tool_use" in self.sources:
            return "tool_use"
        return "default" if "default" in self.sources else next(iter(self.sources))

    @cached_property
    def _compiled(self) -> dict[str, jinja2.Template]:
        from jinja2.exceptions import TemplateSyntaxError

        environment = _environment()
        compiled = {}
        for name, source in self.sources.items():
            try:
                compiled[name] = environment.from_string(source)
            except TemplateSyntaxError as error:
                raise CheckpointError(f"the chat template {name!r}, line {error.lineno}: {error.message}") from error
        return compiled


def opens_reasoning(prompt: str) -> bool:
    """Whether the model, asked this, begins within its thoughts: some templates open them."""
    return prompt.rstrip().endswith(REASONING_TAGS[0])


def read_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, from the files of a checkpoint's folder; the newest way of keeping them wins."""
    found: dict[str, str] = {}
    kept = tokenizer_config.get("chat_template")
    if isinstance(kept, str):
        found["default"] = kept
    elif isinstance(kept, Sequence):
        found.update({entry["name"]: entry["template"] for entry in kept})
    elif isinstance(kept, Mapping):
        found.update(kept)
    path = folder / "chat_template.json"
    if path.is_file():
        kept = read_json(path).get("chat_template") or {}
        found.update({"default": kept} if isinstance(kept, str) else kept)
    path = folder / "chat_template.jinja"
    if path.is_file():
        found["default"] = path.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    return found


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


def plain(value: object) -> Any:
    """The value rebuilt of JSON's types; anything else becomes "<its type>".

    Templates come with checkpoints and are not trusted: an array or a picture has methods that write files, and the
    sandbox does not know them.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return plain(dump())
    return f"<{type(value).__name__}>"


def _fit(message: object, source: str) -> dict[str, Any]:
    """The message as this template can take it."""
    fitted = plain(message)
    if not isinstance(fitted, dict) or not isinstance(fitted.get("role"), str):
        raise RequestError(f"a message is {fitted!r:.100}, expected an object with a role")
    reasoning = next((fitted[name] for name in _REASONING_NAMES if fitted.get(name) is not None), None)
    if reasoning is not None:
        fitted = {"thinking": reasoning, **fitted, "reasoning_content": reasoning}
    # Clients send null beside tool calls. Templates that ask for it get it, the others would walk over it.
    asks_for_none = re.search(r"content['\"]?\]?\s+is\s+(not\s+)?none", source)
    if "content" in fitted and fitted["content"] is None and not asks_for_none:
        fitted["content"] = ""
    # Clients send arguments as a string of JSON. A template without a case for strings would quote it once more.
    takes_strings = re.search(r"arguments['\"]?\]?\s+is\s+(not\s+)?(string|mapping)", source)
    if not takes_strings:
        for call in fitted.get("tool_calls") or ():
            function = call.get("function", call) if isinstance(call, dict) else {}
            if isinstance(function.get("arguments"), str):
                function["arguments"] = _parse_arguments(function)
    return fitted


def _parse_arguments(function: Mapping[str, Any]) -> object:
    """What the model wrote as arguments. That need not be JSON: an answer at its limit of tokens is cut anywhere, and a
    conversation goes on from it all the same."""
    try:
        return whole_part(function["arguments"] or "{}")
    except ValueError:
        return {"arguments": function["arguments"]}


def _environment() -> jinja2.Environment:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %}: marks what the model said, for training; here its body alone."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Namespace(jinja2.utils.Namespace):
        """Jinja's namespace without names that begin with "_": those could reach the interpreter's own."""

        def __init__(*args: Any, **attributes: Any) -> None:
            for name in dict(*args[1:], **attributes):
                Namespace.check(name)
            jinja2.utils.Namespace.__init__(*args, **attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            Namespace.check(name)
            super().__setitem__(name, value)

        @staticmethod
        def check(name: object) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise jinja2.exceptions.SecurityError(
                    f"the namespace has {name!r}, expected no name that begins with _"
                )

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(
        value: object, ensure_ascii: bool = False, indent: int | None = None,
        separators: tuple[str, str] | None = None, sort_keys: bool = False,
    ) -> str:  # fmt: skip
        # Jinja's own escapes <, > and & for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["namespace"] = Namespace
    return environment
