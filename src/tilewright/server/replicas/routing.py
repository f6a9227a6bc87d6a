"""Routes a request to the replica that has computed its prefix, unless that is much busier than others.

Two requests with a common prefix have their first keys in common. The names of the running replicas are a variable of
this module because the router and the server share nothing else: Ray Serve copies the router's class by value, makes
the router from the copy, and gives out no reference to it.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from tilewright.server.link.backend import EngineRequest

running: tuple[str, ...] = ()


# A key covers at least this many characters more than the one before it. A shorter common prefix, such as "You are a
# helpful assistant.", is computed again in less time than a request waits on a busy replica.
MIN_CHARACTERS = 256
CHUNK_CHARACTERS = 1024  # per chunk, so that long texts which differ at their end have keys in common
CHUNK_TOKENS = 256
MAX_KEYS = 256  # per request, for 256 Ki characters; later differences are ignored
# Both ends of a medium are hashed, 0.1 ms of the event loop. Two media that differ only in the middle count as equal
# here, which may cost time on the wrong replica but never changes an answer: the engine's caches hash all bytes.
END_BYTES = 1 << 16


def prefix_keys(request: EngineRequest) -> tuple[bytes, ...]:
    """Return the keys of a request's prefixes, the shortest prefix first."""
    return tuple(islice(_keys(request), MAX_KEYS))


def _keys(request: EngineRequest) -> Iterator[bytes]:
    # Tools and the template's arguments come before the first message in most chat templates.
    setting = json.dumps([request.tools, request.template_arguments], default=repr, sort_keys=True)
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
    """Yield the request's content in order: text in chunks, and each medium's hash, as bytes."""
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


def combined(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of counts, sizes and speeds, and the means of shares and rates.

    `step_age_s` is the minimum: while one replica makes progress, requests are answered.
    """
    names = dict.fromkeys(name for one in stats for name in one)
    together: dict[str, float] = {}
    for name in names:
        values = [one[name] for one in stats if one.get(name) is not None]
        if not values:
            continue
        if name == "step_age_s":
            together[name] = min(values)
        elif name.endswith(("_rate", "_share")):
            together[name] = sum(values) / len(values)
        else:
            together[name] = sum(values)
    return together


# A replica is much busier than others if it exceeds both limits. An engine computes a few more requests per step at
# little cost; many more than on other replicas would leave those idle.
HEADROOM = 4  # requests above the least busy replica
IMBALANCE = 1.5  # times the mean
MAX_ROUTED_KEYS = 200_000  # remembered keys, about 40 MB


class PrefixRouter:
    """Remembers the replicas that prefixes were sent to, by the keys of `prefix_keys`. Not thread-safe."""

    def __init__(self, max_keys: int = MAX_ROUTED_KEYS) -> None:
        self._max_keys = max_keys
        self._replicas_of: OrderedDict[bytes, set[str]] = OrderedDict()  # used last: at the end

    def rank(self, keys: Sequence[bytes], loads: Mapping[str, int], avoid: Collection[str] = ()) -> list[str]:
        """Return the replicas, best first, those of `avoid` last; `loads` has the number of requests of each."""
        first_key = keys[0] if keys else b""
        # Ties are broken by a hash of the prefix, so that all servers in front of them choose the same replica.
        ties = {replica: _weight(first_key, replica) for replica in loads}
        by_load = sorted(loads, key=lambda replica: (loads[replica], ties[replica]))
        limit = self._limit(loads)

        def order(replica: str) -> tuple[bool, int]:
            length = self._match_length(keys, replica) if loads[replica] < limit else 0
            return replica in avoid, -length

        return sorted(by_load, key=order)

    def record(self, keys: Sequence[bytes], replica: str) -> None:
        """Record that a request was sent to a replica, whose caches then have its prefixes."""
        for key in keys:
            self._replicas_of.setdefault(key, set()).add(replica)
            self._replicas_of.move_to_end(key)
        while len(self._replicas_of) > self._max_keys:
            self._replicas_of.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Forget a replica that is gone."""
        for key in [key for key, replicas in self._replicas_of.items() if replica in replicas]:
            self._replicas_of[key].discard(replica)
            if not self._replicas_of[key]:
                del self._replicas_of[key]

    def _match_length(self, keys: Sequence[bytes], replica: str) -> int:
        """Return the number of keys up to the last that the replica has, even if earlier ones were forgotten."""
        for length in range(len(keys), 0, -1):
            if replica in self._replicas_of.get(keys[length - 1], ()):
                return length
        return 0

    @staticmethod
    def _limit(loads: Mapping[str, int]) -> float:
        """Return the number of requests from which a replica counts as much busier than others."""
        if not loads:
            return 0.0
        return max(min(loads.values()) + HEADROOM, IMBALANCE * (sum(loads.values()) + 1) / len(loads))


def _weight(key: bytes, replica: str) -> bytes:
    return hashlib.blake2b(replica.encode(), key=key, digest_size=8).digest()
