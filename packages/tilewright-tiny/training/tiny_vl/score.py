"""When an answer is right, and how many are, by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


def plain(text: str) -> str:
    """The text as answers are compared: lower case, single spaces, no full stop at its end."""
    return " ".join(text.lower().split()).removesuffix(".").rstrip()


def is_same(one: str, other: str) -> bool:
    return plain(one) == plain(other)


@dataclass(frozen=True)
class Answer:
    """What was asked, and what came."""

    index: int  # of the item in its set
    kind: str
    question: str
    expected: str
    got: str

    @property
    def is_right(self) -> bool:
        return is_same(self.expected, self.got)


@dataclass
class Share:
    """How many of a number."""

    num_good: int = 0
    count: int = 0

    def add(self, is_good: bool) -> None:
        self.num_good += is_good
        self.count += 1

    @property
    def value(self) -> float:
        return self.num_good / self.count if self.count else 0.0


def shares_by_kind(marks: Iterable[tuple[str, bool]]) -> dict[str, Share]:
    """The share of good ones of each kind, by name, from (kind, whether it is good)."""
    shares: dict[str, Share] = defaultdict(Share)
    for kind, is_good in marks:
        shares[kind].add(is_good)
    return dict(sorted(shares.items()))


def table(shares: dict[str, Share], what: str) -> str:
    """Lines of kind, share and count, and all of them together at the end."""
    whole = Share(sum(share.num_good for share in shares.values()), sum(share.count for share in shares.values()))
    width = max(len(name) for name in [*shares, "kind", "all"])
    lines = [f"{'kind':{width}}  {what:>8}  {'count':>6}"]
    lines += [
        f"{name:{width}}  {share.value:8.1%}  {share.count:6}" for name, share in [*shares.items(), ("all", whole)]
    ]
    return "\n".join(lines)
