"""The addresses that answer: the body each takes, what it asks of the engine, and who writes its answer.

`app` serves them over HTTP, `tilewright batch` from a file.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tilewright.server.asks import chat_ask, completion_asks
from tilewright.server.backend import Ask, ModelInfo
from tilewright.server.bodies import ChatBody, CompletionBody, SamplingBody
from tilewright.server.chat import ChatWriter, plain_messages
from tilewright.server.completions import CompletionWriter

if TYPE_CHECKING:
    from tilewright.server.respond import Writer


class Gate(Protocol):
    """Brings media in: `media.MediaGate`, or one in front of it."""

    async def bring(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]: ...


class Prepared(NamedTuple):
    """A request that can be answered."""

    asks: list[Ask]
    writer: Writer


async def prepare_chat(body: ChatBody, model: ModelInfo, gate: Gate) -> Prepared:
    messages = await gate.bring(plain_messages(body))
    return Prepared([chat_ask(body, messages, model)], ChatWriter(body, model))


async def prepare_completion(body: CompletionBody, model: ModelInfo, gate: Gate) -> Prepared:
    return Prepared(completion_asks(body), CompletionWriter(body, model))


@dataclass(frozen=True)
class Endpoint:
    body: type[SamplingBody]
    prepare: Callable[[Any, ModelInfo, Gate], Awaitable[Prepared]]


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(ChatBody, prepare_chat),
    "/v1/completions": Endpoint(CompletionBody, prepare_completion),
}
