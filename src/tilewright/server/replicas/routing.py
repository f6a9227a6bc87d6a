"""Which replica gets a request: the one that has computed its beginning, unless it is much busier than others."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

# A replica is much busier than others if it has more requests than both of these. An engine computes a few more in
# one step at little cost; far more of them than on other replicas would leave those idle.
HEADROOM = 4  # more than the least busy one
IMBALANCE = 1.5  # times the mean
MAX_KEYS = 200_000  # remembered: some 40 MB


class PrefixRouter:
    """Remembers which replica was sent what, by the keys of `prefix_keys`. For one thread."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._replicas_of: OrderedDict[bytes, set[str]] = OrderedDict()  # used last: at the end

    def rank(self, keys: Sequence[bytes], loads: Mapping[str, int], avoid: Collection[str] = ()) -> list[str]:
        """The replicas, best first; `loads` has the number of requests of each. Those to avoid come last."""
        first_key = keys[0] if keys else b""
        # Equal ones are ordered by a hash of the beginning, so that all servers in front of them choose alike.
        ties = {replica: _weight(first_key, replica) for replica in loads}
        by_load = sorted(loads, key=lambda replica: (loads[replica], ties[replica]))
        limit = self._limit(loads)

        def order(replica: str) -> tuple[bool, int]:
            length = self._match_length(keys, replica) if loads[replica] < limit else 0
            return replica in avoid, -length

        return sorted(by_load, key=order)

    def note(self, keys: Sequence[bytes], replica: str) -> None:
        """Remembers that a request was sent to a replica, whose caches have its beginnings from now on."""
        for key in keys:
            self._replicas_of.setdefault(key, set()).add(replica)
            self._replicas_of.move_to_end(key)
        while len(self._replicas_of) > self._max_keys:
            self._replicas_of.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Forgets a replica that is gone."""
        for key in [key for key, replicas in self._replicas_of.items() if replica in replicas]:
            self._replicas_of[key].discard(replica)
            if not self._replicas_of[key]:
                del self._replicas_of[key]

    def _match_length(self, keys: Sequence[bytes], replica: str) -> int:
        """How many of the keys a replica has: the longest beginning counts, whatever of it was forgotten."""
        for length in range(len(keys), 0, -1):
            if replica in self._replicas_of.get(keys[length - 1], ()):
                return length
        return 0

    @staticmethod
    def _limit(loads: Mapping[str, int]) -> float:
        """The number of requests from which on a replica is much busier than others."""
        if not loads:
            return 0.0
        return max(min(loads.values()) + HEADROOM, IMBALANCE * (sum(loads.values()) + 1) / len(loads))


def _weight(key: bytes, replica: str) -> bytes:
    return hashlib.blake2b(replica.encode(), key=key, digest_size=8).digest()
