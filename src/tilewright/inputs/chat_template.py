"""Renders messages with the checkpoint's chat template, in a sandbox."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.host import files
from tilewright.host.files import CheckpointError, read_json, read_template
from tilewright.inputs.client_json import whole_part
from tilewright.types import REASONING_TAGS, Messages, RequestError

if TYPE_CHECKING:
    import jinja2

# Arguments that any request may bring: clients also send them to models that never reason.
COMMON_ARGUMENTS = ("enable_thinking", "reasoning_effort")
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A chat template, compiled on first use.

    `source` is the template, or templates by name: "tool_use" renders requests with tools, "default" all others.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        allow_special_tokens: bool = False,  # special tokens in messages' text count as such
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
        """Return the prompt's text. An error that the template raises becomes a RequestError with its message."""
        given = self.given(messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_args)
        return self.run(given)

    def given(
        self, messages: Messages, *, tools: Sequence[object] | None = None, **template_args: object
    ) -> dict[str, Any]:
        """Return the template's variables for a request: JSON types only, in the form that the template expects."""
        source = self.sources[self._choose(bool(tools))]
        return {
            **{key: plain(value) for key, value in template_args.items()},
            "messages": [_fit(message, source) for message in messages],
            "tools": plain(list(tools)) if tools else None,
        }

    def run(self, given: Mapping[str, Any]) -> str:
        """Render the variables that `given` returned, with a generation prompt unless they say otherwise."""
        from jinja2.exceptions import TemplateError

        name = self._choose(bool(given["tools"]))
        try:
            return self._compiled[name].render({**self.special_tokens, "add_generation_prompt": True, **given})
        except TemplateError as error:
            raise RequestError(f"the chat template refused the messages: {error.message or error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError, OverflowError) as error:
            # Errors of a template whose messages have an unexpected form.
            raise RequestError(f"the chat template cannot render the messages: {error}") from error

    def takes(self, name: str) -> bool:
        """Return whether a request may bring an argument `name`: a template reads it, or any request may bring it."""
        return name in COMMON_ARGUMENTS or name in self._variables

    @cached_property
    def _variables(self) -> frozenset[str]:
        from jinja2 import TemplateSyntaxError, meta

        environment, found = _environment(), set[str]()
        for source in self.sources.values():
            with contextlib.suppress(TemplateSyntaxError):  # rendering the first message reports it
                found |= meta.find_undeclared_variables(environment.parse(source))
        return frozenset(found)

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
    """Return whether the prompt ends with an opening reasoning tag, so that the answer starts inside reasoning."""
    return prompt.rstrip().endswith(REASONING_TAGS[0])


def read_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return templates by name from the files of a checkpoint's folder; the newest file format wins."""
    found: dict[str, str] = {}
    kept = tokenizer_config.get("chat_template")
    if isinstance(kept, str):
        found["default"] = kept
    elif isinstance(kept, Sequence):
        found.update({entry["name"]: entry["template"] for entry in kept})
    elif isinstance(kept, Mapping):
        found.update(kept)
    path = folder / "chat_template.json"
    if files.exists(path):
        kept = read_json(path).get("chat_template") or {}
        found.update({"default": kept} if isinstance(kept, str) else kept)
    path = folder / "chat_template.jinja"
    if files.exists(path):
        found["default"] = read_template(path)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = read_template(path)
    return found


def plain(value: object) -> Any:
    """Return the value rebuilt from JSON types; any other type becomes "<its name>".

    Templates come with checkpoints and are not trusted: an array or an image has methods that write files, and the
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
    """Return the message in the form that this template expects."""
    fitted = plain(message)
    if not isinstance(fitted, dict) or not isinstance(fitted.get("role"), str):
        raise RequestError(f"a message is {fitted!r:.100}, expected an object with a role")
    reasoning = next((fitted[name] for name in _REASONING_NAMES if fitted.get(name) is not None), None)
    if reasoning is not None:
        fitted = {"thinking": reasoning, **fitted, "reasoning_content": reasoning}
    # Clients send null beside tool calls. Templates that test for none get it; others would fail.
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
    """Return the parsed arguments of a tool call. They may be incomplete JSON: an answer that reached max_tokens is cut
    anywhere, and clients send it back with the next turn.
    """
    try:
        return whole_part(function["arguments"] or "{}")
    except RequestError as error:
        raise RequestError(f"the text of a tool call's arguments {error}") from None
    except ValueError:
        return {"arguments": function["arguments"]}


def _environment() -> jinja2.Environment:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %}, which marks the model's text for training; it renders its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Namespace(jinja2.utils.Namespace):
        """Jinja's namespace without names that begin with "_", which could reach the interpreter's internals."""

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
        # Jinja's tojson escapes <, > and & for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["namespace"] = Namespace
    return environment
