"""Measures each variant's prediction of a text, answers about images, speed and memory, and reports the results.

V: vocabulary, R: rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.bench import report
from tilewright.bench.report import aligned, write_document
from tilewright.bench.rounds import Prompts
from tilewright.engine.engine import Engine
from tilewright.engine.schedule.sequence import PromptReader
from tilewright.evaluate.material import AnswerScore, EvalVariant, Question, Window, split
from tilewright.types import RequestError

ROWS_AT_ONCE = 64  # a few arrays of log-probabilities [64, 150,000] are in memory at a time


@dataclass
class TextScore:
    """Sums over the scored tokens of a text."""

    num_tokens: int = 0
    surprise: float = 0.0  # sum of -log p
    num_compared: int = 0
    divergences: list[float] = field(default_factory=list)  # KL(reference || this) of each compared token, in nats
    num_same: int = 0  # compared tokens for which both models have the same likeliest token

    @property
    def perplexity(self) -> float:
        return math.exp(self.surprise / self.num_tokens)

    @property
    def mean_divergence(self) -> float | None:
        """The mean KL divergence; None if nothing was compared."""
        return sum(self.divergences) / self.num_compared if self.num_compared else None

    @property
    def divergence_error(self) -> float | None:
        """The standard error of the mean divergence."""
        if self.num_compared < 2:
            return None
        return float(torch.tensor(self.divergences, dtype=torch.float64).std()) / math.sqrt(self.num_compared)

    @property
    def share_same(self) -> float | None:
        """The share of tokens for which both models have the same likeliest token."""
        return self.num_same / self.num_compared if self.num_compared else None


class ReferenceRows:
    """A buffer for the reference's log-probabilities of one window, [scored, V], which the next window overwrites."""

    def __init__(self) -> None:
        self._rows = torch.empty(0)

    def read(self, engine: Engine, window: Window) -> Tensor:
        shape = (window.num_scored, engine.loaded.model.vocab_size)
        if self._rows.shape[0] < shape[0]:
            self._rows = torch.empty(shape)

        def keep(first: int, logits: Tensor) -> None:
            torch.log_softmax(logits, dim=-1, out=self._rows[first : first + logits.shape[0]])

        _read_scored(engine, window, keep)
        return self._rows[: window.num_scored]


def score_window(engine: Engine, window: Window, score: TextScore, reference: Tensor | None = None) -> None:
    """Add the scored tokens of a window to `score`, compared with `reference`, log-probabilities [scored, V]."""
    targets = torch.tensor(window.token_ids[window.first_scored :])

    def add(first: int, logits: Tensor) -> None:
        found = torch.log_softmax(logits, dim=-1)
        end = first + logits.shape[0]
        score.surprise -= float(found.gather(1, targets[first:end, None]).double().sum())
        score.num_tokens += logits.shape[0]
        if reference is None:
            return
        expected = reference[first:end]
        # A token that the reference excludes (-inf) counts as 0: 0 * inf would be NaN.
        apart = torch.where(expected > -math.inf, expected.exp() * (expected - found), 0.0)
        score.divergences += apart.sum(dim=-1, dtype=torch.float64).tolist()
        score.num_same += int((found.argmax(-1) == expected.argmax(-1)).sum())
        score.num_compared += logits.shape[0]

    _read_scored(engine, window, add)


def _read_scored(engine: Engine, window: Window, read: PromptReader) -> None:
    """Call read(i, logits) for the scored tokens of a window, ROWS_AT_ONCE at a time, i counted from the first."""

    def read_part(first: int, logits: Tensor) -> None:
        skipped = max(0, window.first_scored - first)
        first += skipped
        for part in logits[skipped:].split(ROWS_AT_ONCE):
            read(first - window.first_scored, part)
            first += part.shape[0]

    engine.read_logits(window.token_ids, read_part)


ANSWERS_AT_ONCE = 8
PROMPT_TOKENS, NEW_TOKENS = 128, 32  # of the requests for speeds

OpenEngine = Callable[..., Engine]
MakeBar = Callable[[str, int], Any]  # (description, total) -> a bar with update() and close()


@dataclass(frozen=True)
class Speed:
    """Median speeds in tokens per second."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class VariantResult:
    """The results of one variant."""

    name: str
    is_reference: bool
    weight_bytes: int
    kv_bytes_per_token: int
    text: TextScore | None = None
    answers: AnswerScore | None = None
    speed: Speed | None = None


@dataclass(frozen=True)
class EvalSettings:
    """The measurements to make for every variant."""

    variants: Sequence[EvalVariant]
    reference: EvalVariant | None = None  # compared with the others; None: no comparison
    text: str | None = None
    window: int = 512
    stride: int = 256
    max_text_tokens: int | None = None
    questions: Sequence[Question] = ()
    max_answer_tokens: int = 64
    speed_rounds: int = 3


def measure(settings: EvalSettings, open_engine: OpenEngine, make_bar: MakeBar) -> list[VariantResult]:
    """Return a VariantResult for each variant, in order, after that of the reference if it is not among them.

    At most two models are in memory: the current variant's and the reference's, whose log-probabilities are computed
    again for every variant instead of stored.
    """
    variants = list(settings.variants)
    if settings.reference is not None and settings.reference not in variants:
        variants.insert(0, settings.reference)
    results: dict[EvalVariant, VariantResult] = {}
    with ExitStack() as stack:
        reference = None
        if settings.reference is not None:
            reference = stack.enter_context(open_engine(**settings.reference.engine_options))
            results[settings.reference] = _measure_one(settings, settings.reference, reference, None, make_bar)
        for one in variants:
            if one in results:
                continue
            with open_engine(**one.engine_options) as engine:
                results[one] = _measure_one(settings, one, engine, reference, make_bar)
    return [results[one] for one in variants]


def _measure_one(
    settings: EvalSettings, one: EvalVariant, engine: Engine, reference: Engine | None, make_bar: MakeBar
) -> VariantResult:
    speed = _speed(engine, settings.speed_rounds) if settings.speed_rounds else None
    text = answers = None
    if settings.text is not None:
        text = _score_text(settings, one, engine, reference, make_bar)
    if settings.questions:
        answers = _ask(settings, one, engine, make_bar)
    return VariantResult(
        one.name,
        one == settings.reference,
        sum(engine.loaded.report.bytes_by_format.values()),
        engine.kv_bytes_per_token,
        text,
        answers,
        speed,
    )


def windows_of(settings: EvalSettings, engine: Engine) -> list[Window]:
    """Return the windows of the text, tokenized for the engine's model."""
    assert settings.text is not None
    tokenizer = engine.loaded.tokenizer
    token_ids = tokenizer.encode(settings.text)
    with_special = tokenizer.encode("a", add_special_tokens=True)
    beginning = with_special[: -len(tokenizer.encode("a"))]
    if settings.window > engine.limits.max_context - 1:
        most = engine.limits.max_context - 1
        raise RequestError(f"--window is {settings.window}, expected at most {most}, the model's context less one")
    return split(token_ids[: settings.max_text_tokens], settings.window, settings.stride, beginning)


def _score_text(
    settings: EvalSettings, one: EvalVariant, engine: Engine, reference: Engine | None, make_bar: MakeBar
) -> TextScore:
    windows, score, rows = windows_of(settings, engine), TextScore(), ReferenceRows()
    bar = make_bar(f"{one.name}: text", sum(window.num_scored for window in windows))
    for window in windows:
        score_window(engine, window, score, None if reference is None else rows.read(reference, window))
        bar.set_postfix_str(f"perplexity {score.perplexity:.4g}", refresh=False)
        bar.update(window.num_scored)
    bar.close()
    return score


def _ask(settings: EvalSettings, one: EvalVariant, engine: Engine, make_bar: MakeBar) -> AnswerScore:
    if "image" not in engine.loaded.processor.accepts:
        raise RequestError(f"--pictures is given, but {engine.loaded.name} accepts no images")
    bar = make_bar(f"{one.name}: images", len(settings.questions))
    is_right: list[bool] = []
    for start in range(0, len(settings.questions), ANSWERS_AT_ONCE):
        some = settings.questions[start : start + ANSWERS_AT_ONCE]
        conversations = [question.messages for question in some]
        found = engine.chat(conversations, temperature=0.0, max_tokens=settings.max_answer_tokens)
        is_right += [question.is_right(answer.text) for question, answer in zip(some, found, strict=True)]
        bar.set_postfix_str(f"{sum(is_right) / len(is_right):.1%} right", refresh=False)
        bar.update(len(some))
    bar.close()
    return AnswerScore.of(settings.questions, is_right)


def _speed(engine: Engine, num_rounds: int) -> Speed:
    """Return the median speed of single answers to new random prompts, after a first one that warms up."""
    prompts = Prompts(engine)
    prefill, decode = [], []
    for number in range(num_rounds + 1):
        (answer,) = prompts.answers([prompts.ids(PROMPT_TOKENS, number)], NEW_TOKENS)
        if number:
            first_s, total_s = answer.timings.first_token_s, answer.timings.total_s
            prefill.append(PROMPT_TOKENS / first_s)
            decode.append((NEW_TOKENS - 1) / (total_s - first_s))
    return Speed(statistics.median(prefill), statistics.median(decode))


def as_table(results: Sequence[VariantResult]) -> str:
    """Return a table with a line for each variant, without columns of missing measurements."""
    columns = [_column(results, *column) for column in _COLUMNS]
    shown = [column for column in columns if any(column[1:])]
    return "\n".join(aligned(list(zip(*shown, strict=True)), left=(0,)))


def as_document(results: Sequence[VariantResult]) -> list[dict[str, object]]:
    """Return the results as JSON values, with all digits."""
    return [_entry(result) for result in results]


def write_json(path: Path, results: Sequence[VariantResult], about: dict[str, object]) -> None:
    write_document(path, about | {"formats": as_document(results)})


def _entry(result: VariantResult) -> dict[str, object]:
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


def _column(results: Sequence[VariantResult], head: str, cell: Callable[[VariantResult], str]) -> list[str]:
    return [head, *(cell(result) for result in results)]


def _divergence(result: VariantResult) -> str:
    if result.text is None or (mean := result.text.mean_divergence) is None:
        return ""
    error = result.text.divergence_error
    return f"{mean:.5f}" if error is None else f"{mean:.5f} ± {error:.5f}"


def _same(result: VariantResult) -> str:
    share = None if result.text is None else result.text.share_same
    return "" if share is None else f"{share:.2%}"


_COLUMNS: tuple[tuple[str, Callable[[VariantResult], str]], ...] = (
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


def write_plot(path: Path, results: Sequence[VariantResult], title: str) -> None:
    """Plot quality over speed (up and to the right is better) and over memory (up and to the left is better)."""
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
    report.save_figure(path, figure)


def _quality(results: Sequence[VariantResult]) -> tuple[str, list[float]]:
    """Return the quality to plot, with its label: distance to the reference, else accuracy, else perplexity."""
    if any(result.text and result.text.num_compared for result in results):
        return "KL to the reference", [(result.text and result.text.mean_divergence) or 0.0 for result in results]
    if all(result.answers for result in results):
        return "answers right, %", [100 * result.answers.share for result in results if result.answers]
    return "perplexity", [result.text.perplexity if result.text else math.nan for result in results]
