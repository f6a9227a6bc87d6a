"""Keys of a request's beginnings: two requests that begin alike have their first keys in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from tilewright.server.link.backend import EngineRequest

# A key covers at least this much more than the one before it. A shorter common beginning, such as "You are a helpful
# assistant.", is computed again in less time than a request waits on a replica that has others to compute.
MIN_CHARACTERS = 256
CHUNK_CHARACTERS = 1024  # text is cut there, so that long texts which differ at their end have keys in common
CHUNK_TOKENS = 256
MAX_KEYS = 256  # of one request: 256 Ki characters; requests that differ later are as good as equal
# Of a medium both ends are hashed, 0.1 ms of the event loop. Two media that differ in the middle alone are taken for
# equal here, which costs time on the wrong replica and never an answer: the engine's own caches hash all of it.
END_BYTES = 1 << 16


def prefix_keys(request: EngineRequest) -> tuple[bytes, ...]:
    """The keys of a request's beginnings, the shortest beginning first."""
    return tuple(islice(_keys(request), MAX_KEYS))


def _keys(request: EngineRequest) -> Iterator[bytes]:
    # Tools and the template's arguments come before the first message in most chat templates.
    setting = json.dumps([request.tools, request.template_args], default=repr, sort_keys=True)
    digest = hashlib.blake2b(setting.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    num_characters = len(setting) if request.tools else 0
    for piece in _pieces(request):
        is_medium = isinstance(piece, bytes)
        data = piece if isinstance(piece, bytes) else piece.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(digest + len(data).to_bytes(8, "little") + data, digest_size=16).digest()
        num_characters += len(piece)
        if is_medium or num_characters >= MIN_CHARACTERS:
            num_characters = 0
            yield digest


def _pieces(request: EngineRequest) -> Iterator[str | bytes]:
    """The request's content in order: text in chunks, and of each medium a hash, as bytes."""
    if request.text is not None:
        yield from _chunks(request.text)
    for start in range(0, len(request.token_ids or ()), CHUNK_TOKENS):
        yield " ".join(map(str, (request.token_ids or ())[start : start + CHUNK_TOKENS]))
    for message in request.messages or ():
        yield str(message.get("role"))
        yield from _content(message.get("content"))
        if message.get("tool_calls"):
            yield json.dumps(message["tool_calls"], default=repr, sort_keys=True)


def _content(content: Any) -> Iterator[str | bytes]:
    if isinstance(content, str):
        yield from _chunks(content)
    elif isinstance(content, bytes):
        yield _media_hash(content)
    elif isinstance(content, Mapping):
        for name in sorted(content):
            yield str(name)
            yield from _content(content[name])
    elif isinstance(content, list | tuple):
        for item in content:
            yield from _content(item)
    elif content is not None:
        yield repr(content)


def _chunks(text: str) -> Iterator[str]:
    for start in range(0, len(text), CHUNK_CHARACTERS):
        yield text[start : start + CHUNK_CHARACTERS]


def _media_hash(data: bytes) -> bytes:
    ends = data if len(data) <= 2 * END_BYTES else data[:END_BYTES] + data[-END_BYTES:]
    return hashlib.blake2b(len(data).to_bytes(8, "little") + ends, digest_size=16).digest()
