"""Token ids of a conversation. Only the template writes special tokens: text of a request that spells one stays text.

A template joins its own text and the request's into one string, in which a tokenizer cannot tell whose `<|im_end|>` it
sees. So in the request's strings every character that could begin such a token is replaced by a stand-in before the
template runs, and restored after it. Stand-ins are single characters, so that lengths, cuts and trims in a template
work as before.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from tilewright.inputs.chat_template import ChatTemplate, opens_reasoning
from tilewright.inputs.messages import TextBudget
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.types import Messages, RequestError

# Roles that may write the tags of reasoning and tool calls, which are tokens but not special tokens: an assistant's
# message has them, and a system message may show the model how to use them. In a user's text or a tool's result they
# could forge or end a tool's result.
_ROLES_WITH_TAGS = ("assistant", "system", "developer")
_PRIVATE_USE = "[\U000f0000-\U000ffffd\U00100000-\U0010fffd]"


class ChatEncoder:
    """Encodes conversations with a template and a tokenizer."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens
        special = {token for token, is_special in added.items() if is_special}
        # Other added tokens count only if the template uses them: a vocabulary may also have added words and spaces.
        source = "".join(template.sources.values())
        tags = {token for token in added if token[0] in "<[" and token in source} - special
        self._first_characters = sorted({token[0] for token in special | tags})
        self._special = _prefixes_of(special)
        self._special_and_tags = _prefixes_of(special | tags)
        self._added = _any_of(added)

    def encode(
        self,
        messages: Messages,
        *,
        tools: Sequence[object] | None = None,
        continue_final_message: bool = False,
        budget: TextBudget | None = None,
        **template_args: object,
    ) -> tuple[list[int], bool]:
        """Return the ids up to the model's answer, and whether the answer starts inside reasoning.

        With `continue_final_message` the answer continues the last message, which must be the assistant's.
        """
        if continue_final_message:
            template_args["add_generation_prompt"] = False
        try:
            given = self._template.given(messages, tools=tools, **template_args)
            mark, end, *characters = _unused(given, 2 + len(self._first_characters))
            if continue_final_message:
                given["messages"].append(_ending_in(end, given["messages"].pop()))
            stand_ins = dict(zip(self._first_characters, characters, strict=True))
            return self._encode(given, stand_ins, mark, end if continue_final_message else None, budget)
        except RecursionError:
            raise RequestError("the messages are nested too deeply") from None

    def _encode(
        self,
        given: Mapping[str, Any],
        stand_ins: Mapping[str, str],
        mark: str,
        end: str | None,
        budget: TextBudget | None,
    ) -> tuple[list[int], bool]:
        if self._template.allow_special_tokens:
            text = self._run(given, end)
            return self._tokenizer.encode(text, budget=budget), opens_reasoning(text)
        originals = {ord(stand_in): character for character, stand_in in stand_ins.items()}
        marked = self._run(self._stand_in(given, stand_ins), end)
        text = marked.translate(originals)
        if text == marked or self._added_in(text) == self._added_in(marked):
            ids = self._tokenizer.encode(text, budget=budget)
        else:
            own_marked = self._added.sub(lambda match: mark + match[0], marked)
            ids = self._tokenizer.encode_marked(own_marked.translate(originals), mark, budget=budget)
        return ids, opens_reasoning(text)

    def _run(self, given: Mapping[str, Any], end: str | None) -> str:
        """Render the template; cut the text at the character `end` if it is not None."""
        text = self._template.run(given)
        if end is not None and text.count(end) != 1:
            message = "continue_final_message is true, but the chat template does not write the last message unchanged"
            raise RequestError(message, param="continue_final_message")
        return text if end is None else text[: text.index(end)]

    def _stand_in(self, given: Mapping[str, Any], stand_ins: Mapping[str, str]) -> dict[str, Any]:
        """Return the template's variables with stand-ins in the request's strings."""
        rest = {name: value for name, value in given.items() if name != "messages"}
        messages = [
            _replace(
                message, self._special if message["role"] in _ROLES_WITH_TAGS else self._special_and_tags, stand_ins
            )
            for message in given["messages"]
        ]
        return {**_replace(rest, self._special, stand_ins), "messages": messages}

    def _added_in(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in self._added.finditer(text)]


def _ending_in(end: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with the character `end` appended, which marks its end in the prompt."""
    content = message.get("content")
    last = content[-1] if isinstance(content, list) and content else content
    text = last.get("text") if isinstance(last, dict) else last
    if message["role"] != "assistant" or message.get("tool_calls") or not isinstance(text, str):
        raise RequestError(
            f"continue_final_message is true and the last message the {message['role']}'s, expected the assistant's, "
            "with text and without tool calls",
            param="continue_final_message",
        )
    if isinstance(content, list):
        return {**message, "content": [*content[:-1], {**content[-1], "text": text + end}]}
    return {**message, "content": text + end}


def _any_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Return a pattern for any of the tokens, the longest first, as tokenizers match them."""
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _prefixes_of(tokens: Collection[str]) -> re.Pattern[str]:
    """Return a pattern for characters that begin a token, or may after a template has joined strings.

    A complete tag that is not one of the tokens is not matched: templates search messages for <think>.
    """
    signs = "".join(sorted({token[0] for token in tokens if not token[0].isalnum() and not token[0].isspace()}))
    ways = [f"[{re.escape(signs)}](?!/?\\w+>)"] if signs else []
    ways += [f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in sorted(tokens)]
    return re.compile("|".join(ways) or r"(?!)")


def _replace(value: Any, prefixes: re.Pattern[str], stand_ins: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return prefixes.sub(lambda match: stand_ins[match[0]], value)
    if isinstance(value, dict):
        return {_replace(key, prefixes, stand_ins): _replace(item, prefixes, stand_ins) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace(item, prefixes, stand_ins) for item in value]
    return value


def _unused(value: Any, count: int) -> list[str]:
    """Return `count` private-use characters that do not occur in the value's strings."""
    used = {character for text in _strings(value) for character in re.findall(_PRIVATE_USE, text)}
    characters = map(chr, chain(range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)))
    unused = list(islice((character for character in characters if character not in used), count))
    if len(unused) < count:
        raise RequestError(f"the messages have {len(used)} different private-use characters, which leaves too few")
    return unused


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
