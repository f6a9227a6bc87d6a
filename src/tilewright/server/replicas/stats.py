"""The stats of several engines as those of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def combined(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums of counts, sizes and speeds, means of shares.

    `step_age_s` is the least: as long as one replica makes progress, requests are answered.
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
