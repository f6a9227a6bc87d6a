"""Chat completions: from the engine's events to OpenAI's objects and chunks, spoken answers included."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tilewright.inputs.messages import UNSERVED_KEYS
from tilewright.outputs.sound import encode
from tilewright.server.api.bodies import ChatBody
from tilewright.server.api.fields import IMAGE_URL, MESSAGE, PART, FieldFault, find_fault
from tilewright.server.http.respond import ChunkWriter
from tilewright.server.link.backend import AUDIO_RATE, AnswerDelta, DecodedLogprob, Ended, ModelInfo, Started
from tilewright.server.output import OutputParser, Piece, ToolCallDelta, has_reasoning, tool_syntax_of
from tilewright.types import RequestError


class ChatAudio:
    """The sound of one answer, collected as it is generated; `format` is the format of the complete file."""

    def __init__(self, format: str) -> None:
        self._format = format
        self._id = f"audio_{uuid.uuid4().hex}"
        self._pieces: list[bytes] = []

    def add(self, pcm16: bytes) -> dict[str, Any]:
        """Append samples; return the audio field of their stream chunk."""
        self._pieces.append(pcm16)
        return {"id": self._id, "data": base64.b64encode(pcm16).decode()}

    def result(self, *, transcript: str) -> dict[str, Any]:
        """Return the audio field of the complete answer. The server does not store it, so it expires at once."""
        data = encode(b"".join(self._pieces), AUDIO_RATE, self._format)
        return {
            "id": self._id,
            "data": base64.b64encode(data).decode(),
            "expires_at": int(time.time()),
            "transcript": transcript,
        }


class ChatWriter(ChunkWriter):
    """Writes the answer to one chat request."""

    def __init__(self, body: ChatBody, model: ModelInfo) -> None:
        super().__init__(body)
        self.has_sound = body.is_spoken
        self._body = body
        self._model = model
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._choices: dict[int, _Choice] = {}
        self._opens_reasoning = False
        self._ended: Ended | None = None

    def add(self, prompt_index: int, event: Started | AnswerDelta | Ended) -> Iterator[dict[str, Any]]:
        """Record an event and yield its stream chunks, which are ignored without `stream`."""
        if isinstance(event, Started):
            self._opens_reasoning = event.opens_reasoning
        elif isinstance(event, Ended):
            self._ended = event
        else:
            yield from self._add_chunk(event)

    def usage_chunk(self) -> dict[str, Any]:
        return self._chunk([], usage=self._usage(), timings=self._timings())

    def result(self) -> dict[str, Any]:
        """Return the complete answer."""
        choices = [self._choices[index].result(index) for index in sorted(self._choices)]
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage(), "timings": self._timings()}

    def _add_chunk(self, event: AnswerDelta) -> Iterator[dict[str, Any]]:
        if event.index not in self._choices:
            parser = make_output_parser(self._body, self._model, self._opens_reasoning)
            audio = ChatAudio(self._body.audio_format) if self._body.is_spoken else None
            self._choices[event.index] = _Choice(parser, audio)
            yield self._chunk([_delta(event.index, {"role": "assistant", "content": ""})])
        choice = self._choices[event.index]
        logprobs = None if event.logprobs is None else [_logprob(item) for item in event.logprobs]
        deltas = [_piece_delta(piece) for piece in choice.add(event, logprobs)]
        if logprobs and not deltas:
            deltas = [{}]
        for number, delta in enumerate(deltas):
            yield self._chunk([_delta(event.index, delta, None if number else logprobs)])
        if event.audio and choice.audio is not None:
            yield self._chunk([_delta(event.index, {"audio": choice.audio.add(event.audio)})])
        if choice.finish_reason is not None:
            yield self._chunk([_delta(event.index, {}, finish_reason=choice.finish_reason)])

    def _chunk(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk"), "choices": choices, **self.no_usage, **more}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model.name}

    def _usage(self) -> dict[str, Any]:
        assert self._ended is not None
        return usage([self._ended])

    def _timings(self) -> dict[str, float]:
        assert self._ended is not None
        return timings(self._ended)


class _Choice:
    """The part of one of the n answers that is generated so far."""

    def __init__(self, parser: OutputParser, audio: ChatAudio | None) -> None:
        self._parser = parser
        self.audio = audio  # None unless the answer is spoken
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []  # the first delta of each call
        self._arguments: list[list[str]] = []  # the pieces of its arguments
        self._logprobs: list[dict[str, Any]] | None = None
        self.finish_reason: str | None = None

    def add(self, event: AnswerDelta, logprobs: list[dict[str, Any]] | None) -> list[Piece]:
        pieces = self._parser.push(event.text) if event.text else []
        if event.finish_reason is not None:
            pieces = [*pieces, *self._parser.finish()]
            is_call = event.finish_reason == "stop" and self._parser.has_tool_calls
            self.finish_reason = "tool_calls" if is_call else event.finish_reason
        if logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs.extend(logprobs)
        for piece in pieces:
            self._keep(piece)
        return pieces

    def result(self, index: int) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self._calls else "")}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                _call(call, "".join(pieces)) for call, pieces in zip(self._calls, self._arguments, strict=True)
            ]
        if self.audio is not None:
            message["audio"] = self.audio.result(transcript=content)
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self.finish_reason}

    def _keep(self, piece: Piece) -> None:
        if piece.tool_call is None:
            (self._reasoning if piece.reasoning else self._content).append(piece.reasoning or piece.content)
            return
        call = piece.tool_call
        if call.index == len(self._calls):
            self._calls.append(call)
            self._arguments.append([])
        self._arguments[call.index].append(call.arguments)


def make_output_parser(body: ChatBody, model: ModelInfo, opens_reasoning: bool) -> OutputParser:
    """Return a parser that splits the text of one answer into reasoning, content and tool calls."""
    return OutputParser(
        tool_syntax=tool_syntax_of(model.template) if model.template and body.tools_in_use else None,
        tools=body.tools_in_use,
        opens_reasoning=opens_reasoning,
        splits_reasoning=model.template is not None and has_reasoning(model.template),
    )


def usage(ended: Sequence[Ended]) -> dict[str, Any]:
    """Return the token counts of a request's prompts and answers."""
    num_prompt_tokens = sum(one.num_prompt_tokens for one in ended)
    num_output_tokens = sum(one.num_output_tokens for one in ended)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.num_cached_tokens for one in ended)},
    }


def timings(ended: Ended) -> dict[str, float]:
    """Return the times and speeds of an answer (not part of OpenAI's interface); unknown values are left out."""
    measured, num_later_tokens = ended.timings, ended.num_output_tokens - 1
    decode_s = measured.total_s - measured.first_token_s
    speeds = {
        "tokens_per_s": num_later_tokens / decode_s if num_later_tokens > 0 and decode_s > 0 else None,
        "bandwidth_share": ended.bandwidth_share,
    }
    known = {name: value for name, value in speeds.items() if value is not None}
    return {
        "queued_s": measured.queued_s,
        "time_to_first_token_s": measured.first_token_s,
        "total_s": measured.total_s,
        **known,
    }


def plain_messages(body: ChatBody) -> list[dict[str, Any]]:
    """Return the messages in the engine's form; raise RequestError for an unknown role or a refused field."""
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    for number, message in enumerate(messages, 1):
        _check_message(message, f"messages[{number - 1}]")
        if message["role"] == "developer":  # the newer name
            message["role"] = "system"
        if message["role"] not in ("system", "user", "assistant", "tool"):
            raise RequestError(
                f"message {number}: its role is {message['role'][:40]!r}, expected system, user, assistant or tool",
                param="messages",
            )
        if message.get("refusal") and not message.get("content"):  # the model's text when it refused
            message["content"] = message.pop("refusal")
    return messages


# The types of message parts and their fields; `inputs.precomputed` checks types that are not listed.
_PART_FIELDS = {
    "text": ("type", "text"),
    "refusal": ("type", "refusal"),
    "input_audio": ("type", "input_audio"),
    **dict.fromkeys(("image_url", "image"), ("type", "image_url", "image")),
    **dict.fromkeys(("video_url", "video"), ("type", "video_url", "video", "fps", "use_audio_in_video")),
    **dict.fromkeys(("audio_url", "audio"), ("type", "audio_url", "audio")),
}


def _check_message(message: Mapping[str, Any], where: str) -> None:
    """Raise RequestError for a refused field of a message, or of a part of its content."""
    named = {name: value for name, value in message.items() if name in MESSAGE}
    _refuse(find_fault(named, MESSAGE, ()), where)
    content = message.get("content")
    for index, part in enumerate(content if isinstance(content, list) else ()):
        fields = _PART_FIELDS.get(str(part.get("type")))
        if fields is None:
            continue
        place = f"{where}.content[{index}]"
        # `normalize` refuses sizes and times set for a single medium.
        more = {name: value for name, value in part.items() if name not in fields and name not in UNSERVED_KEYS}
        _refuse(find_fault(more, PART, fields), place)
        if isinstance(image := part.get("image_url"), dict):
            more = {name: value for name, value in image.items() if name != "url"}
            _refuse(find_fault(more, IMAGE_URL, ("url",)), f"{place}.image_url")


def _refuse(fault: FieldFault | None, where: str) -> None:
    if fault is not None:
        raise RequestError(f"{where}.{fault.message}", param="messages", code=fault.code)


def _delta(
    index: int,
    delta: Mapping[str, Any],
    logprobs: list[dict[str, Any]] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    kept = None if logprobs is None else {"content": logprobs, "refusal": None}
    return {"index": index, "delta": delta, "logprobs": kept, "finish_reason": finish_reason}


def _call(call: ToolCallDelta, arguments: str) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _piece_delta(piece: Piece) -> dict[str, Any]:
    if piece.tool_call is None:
        return {"reasoning_content": piece.reasoning} if piece.reasoning else {"content": piece.content}
    call = piece.tool_call
    function: dict[str, Any] = {"arguments": call.arguments}
    first: dict[str, Any] = {}
    if call.name is not None:
        function = {"name": call.name, **function}
        first = {"id": call.id, "type": "function"}
    return {"tool_calls": [{"index": call.index, **first, "function": function}]}


def _logprob(item: DecodedLogprob) -> dict[str, Any]:
    top = [_token(token, logprob) for token, logprob in item.top]
    return {**_token(item.token, item.logprob), "top_logprobs": top}


def _token(token: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(token)}


def finite(logprob: float | None) -> float | None:
    """Return a log-probability that JSON can hold: -inf becomes OpenAI's -9999."""
    return logprob if logprob is None or logprob > -9999.0 else -9999.0
