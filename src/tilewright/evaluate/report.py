"""What was measured as a table, JSON and a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from tilewright.bench import common
from tilewright.bench.report import aligned, write_document
from tilewright.evaluate.measure import Result


def as_table(results: Sequence[Result]) -> str:
    """A line for each format; columns of what was not measured are left out."""
    columns = [_column(results, *column) for column in _COLUMNS]
    shown = [column for column in columns if any(column[1:])]
    return "\n".join(aligned(list(zip(*shown, strict=True)), left=(0,)))


def as_document(results: Sequence[Result]) -> list[dict[str, object]]:
    """The same as plain data, with more digits."""
    return [_entry(result) for result in results]


def write_json(path: Path, results: Sequence[Result], about: dict[str, object]) -> None:
    write_document(path, about | {"formats": as_document(results)})


def _entry(result: Result) -> dict[str, object]:
    entry: dict[str, object] = {
        "format": result.name,
        "is_reference": result.is_reference,
        "weight_bytes": result.weight_bytes,
        "kv_bytes_per_token": result.kv_bytes_per_token,
    }
    if (text := result.text) is not None:
        entry["text"] = {
            "num_tokens": text.num_tokens,
            "perplexity": text.perplexity,
            "mean_kl": text.mean_divergence,
            "mean_kl_standard_error": text.divergence_error,
            "same_top_1": text.share_same,
        }
    if (answers := result.answers) is not None:
        entry["pictures"] = {
            "num_questions": answers.num_questions,
            "num_right": answers.num_right,
            "by_kind": {kind: {"right": right, "of": count} for kind, (right, count) in answers.by_kind.items()},
        }
    if (speed := result.speed) is not None:
        entry["tokens_per_s"] = {"prefill": speed.prefill, "decode": speed.decode}
    return entry


def _column(results: Sequence[Result], head: str, cell: Callable[[Result], str]) -> list[str]:
    return [head, *(cell(result) for result in results)]


def _divergence(result: Result) -> str:
    if result.text is None or (mean := result.text.mean_divergence) is None:
        return ""
    error = result.text.divergence_error
    return f"{mean:.5f}" if error is None else f"{mean:.5f} ± {error:.5f}"


def _same(result: Result) -> str:
    share = None if result.text is None else result.text.share_same
    return "" if share is None else f"{share:.2%}"


_COLUMNS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("format", lambda r: r.name + (" (reference)" if r.is_reference else "")),
    ("weights", lambda r: f"{r.weight_bytes / 1e9:.3f} GB"),
    ("KV/token", lambda r: f"{r.kv_bytes_per_token / 1024:.1f} KiB"),
    ("perplexity", lambda r: f"{r.text.perplexity:.4f}" if r.text else ""),
    ("KL", _divergence),
    ("same top-1", _same),
    ("right", lambda r: f"{r.answers.num_right}/{r.answers.num_questions}" if r.answers else ""),
    ("prefill", lambda r: f"{r.speed.prefill:.1f} tok/s" if r.speed else ""),
    ("decode", lambda r: f"{r.speed.decode:.1f} tok/s" if r.speed else ""),
)


def write_plot(path: Path, results: Sequence[Result], title: str) -> None:
    """What is lost in quality against speed, and against memory: up and to the right, or to the left, is better."""
    from matplotlib.figure import Figure  # imported here: only plots need it

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    label, qualities = _quality(results)
    sides = [("weights, GB", [result.weight_bytes / 1e9 for result in results])]
    if all(result.speed for result in results):
        sides.insert(0, ("decode, tokens/s", [result.speed.decode for result in results if result.speed]))
    for axes, (name, amounts) in zip(figure.subplots(1, len(sides), squeeze=False)[0], sides, strict=True):
        for number, (result, x, y) in enumerate(zip(results, amounts, qualities, strict=True)):
            axes.scatter([x], [y], s=60, color=f"C{number % 10}", zorder=3)
            axes.annotate(result.name, (x, y), xytext=(7, 5), textcoords="offset points")
        axes.set(xlabel=name, ylabel=label)
        axes.set_xlim(left=0, right=1.25 * max(amounts))
        axes.margins(y=0.15)
        if label.startswith(("KL", "perplexity")):
            axes.invert_yaxis()  # less is better
        axes.grid(True, alpha=0.3)
    figure.suptitle(title)
    common.write_plot(path, figure)


def _quality(results: Sequence[Result]) -> tuple[str, list[float]]:
    """What the plot shows of quality: the distance to the reference, else accuracy, else perplexity."""
    if any(result.text and result.text.num_compared for result in results):
        return "KL to the reference", [(result.text and result.text.mean_divergence) or 0.0 for result in results]
    if all(result.answers for result in results):
        return "answers right, %", [100 * result.answers.share for result in results if result.answers]
    return "perplexity", [result.text.perplexity if result.text else math.nan for result in results]
