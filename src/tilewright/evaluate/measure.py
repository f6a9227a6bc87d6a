"""Measures one format after the other: text, pictures, speed, memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tilewright.bench.rounds import Prompts
from tilewright.engine.engine import Engine
from tilewright.evaluate.agreement import ReferenceRows, TextScore, score_window
from tilewright.evaluate.formats import EvalFormat
from tilewright.evaluate.questions import AnswerScore, Question
from tilewright.evaluate.windows import Window, split
from tilewright.types import RequestError

ANSWERS_AT_ONCE = 8
PROMPT_TOKENS, NEW_TOKENS = 128, 32  # of what speeds are measured with

OpenEngine = Callable[..., Engine]
Progress = Callable[[str, int], Any]  # (what, how many) -> a bar with update() and close()


@dataclass(frozen=True)
class Speed:
    """Medians, in tokens per second."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class Result:
    """What one format gives."""

    name: str
    is_reference: bool
    weight_bytes: int
    kv_bytes_per_token: int
    text: TextScore | None = None
    answers: AnswerScore | None = None
    speed: Speed | None = None


@dataclass(frozen=True)
class Plan:
    """What is measured of every format."""

    formats: Sequence[EvalFormat]
    reference: EvalFormat | None = None  # what the others are compared with; None: nothing
    text: str | None = None
    window: int = 512
    stride: int = 256
    max_text_tokens: int | None = None
    questions: Sequence[Question] = ()
    max_answer_tokens: int = 64
    speed_rounds: int = 3


def measure(plan: Plan, open_engine: OpenEngine, progress: Progress) -> list[Result]:
    """A Result for each format, in their order, and for the reference before them if it is not among them.

    At most two models are in memory: the reference's, whose log-probabilities of each window are computed once more
    for every format instead of kept, and that of the format at hand.
    """
    formats = list(plan.formats)
    if plan.reference is not None and plan.reference not in formats:
        formats.insert(0, plan.reference)
    results: dict[EvalFormat, Result] = {}
    with ExitStack() as stack:
        reference = None
        if plan.reference is not None:
            reference = stack.enter_context(open_engine(**plan.reference.engine_options))
            results[plan.reference] = _measure_one(plan, plan.reference, reference, None, progress)
        for one in formats:
            if one in results:
                continue
            with open_engine(**one.engine_options) as engine:
                results[one] = _measure_one(plan, one, engine, reference, progress)
    return [results[one] for one in formats]


def _measure_one(plan: Plan, one: EvalFormat, engine: Engine, reference: Engine | None, progress: Progress) -> Result:
    speed = _speed(engine, plan.speed_rounds) if plan.speed_rounds else None
    text = answers = None
    if plan.text is not None:
        text = _score_text(plan, one, engine, reference, progress)
    if plan.questions:
        answers = _ask(plan, one, engine, progress)
    return Result(
        one.name,
        one == plan.reference,
        sum(engine.loaded.report.bytes_by_format.values()),
        engine.kv_bytes_per_token,
        text,
        answers,
        speed,
    )


def windows_of(plan: Plan, engine: Engine) -> list[Window]:
    """The text as the engine's model reads it."""
    assert plan.text is not None
    tokenizer = engine.loaded.tokenizer
    token_ids = tokenizer.encode(plan.text)
    with_special = tokenizer.encode("a", add_special_tokens=True)
    beginning = with_special[: -len(tokenizer.encode("a"))]
    if plan.window > engine.limits.max_context - 1:
        most = engine.limits.max_context - 1
        raise RequestError(f"--window is {plan.window}, expected at most {most}, the model's context less one")
    return split(token_ids[: plan.max_text_tokens], plan.window, plan.stride, beginning)


def _score_text(plan: Plan, one: EvalFormat, engine: Engine, reference: Engine | None, progress: Progress) -> TextScore:
    windows, score, rows = windows_of(plan, engine), TextScore(), ReferenceRows()
    bar = progress(f"{one.name}: text", sum(window.num_scored for window in windows))
    for window in windows:
        score_window(engine, window, score, None if reference is None else rows.read(reference, window))
        bar.set_postfix_str(f"perplexity {score.perplexity:.4g}", refresh=False)
        bar.update(window.num_scored)
    bar.close()
    return score


def _ask(plan: Plan, one: EvalFormat, engine: Engine, progress: Progress) -> AnswerScore:
    if "image" not in engine.loaded.processor.accepts:
        raise RequestError(f"--pictures is given, but {engine.loaded.name} takes no pictures")
    bar = progress(f"{one.name}: pictures", len(plan.questions))
    is_right: list[bool] = []
    for start in range(0, len(plan.questions), ANSWERS_AT_ONCE):
        some = plan.questions[start : start + ANSWERS_AT_ONCE]
        conversations = [question.messages for question in some]
        found = engine.chat(conversations, temperature=0.0, max_tokens=plan.max_answer_tokens)
        is_right += [question.is_right(answer.text) for question, answer in zip(some, found, strict=True)]
        bar.set_postfix_str(f"{sum(is_right) / len(is_right):.1%} right", refresh=False)
        bar.update(len(some))
    bar.close()
    return AnswerScore.of(plan.questions, is_right)


def _speed(engine: Engine, num_rounds: int) -> Speed:
    """Of one answer at a time, each to a new random prompt; a first one warms up."""
    prompts = Prompts(engine)
    prefill, decode = [], []
    for number in range(num_rounds + 1):
        (answer,) = prompts.answers([prompts.ids(PROMPT_TOKENS, number)], NEW_TOKENS)
        if number:
            first_s, total_s = answer.timings.first_token_s, answer.timings.total_s
            prefill.append(PROMPT_TOKENS / first_s)
            decode.append((NEW_TOKENS - 1) / (total_s - first_s))
    return Speed(statistics.median(prefill), statistics.median(decode))
