"""How many questions of the test set are answered right, by kind. From the top of the repository:

python -m training.tiny_vl.evaluate                                 through a server of our own, started for it
python -m training.tiny_vl.evaluate --json ours.json --dtype float32
python -m training.tiny_vl.evaluate --transformers --json theirs.json --dtype float32
python -m training.tiny_vl.evaluate --compare ours.json theirs.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from tilewright.flags.options import positive
from tilewright.weights import embedded
from training.tiny_vl import askers
from training.tiny_vl.score import Answer, is_same, shares_by_kind, table

if TYPE_CHECKING:
    from training.tiny_vl.items import Item

MAX_SHOWN = 100  # wrong answers, or differing ones


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    options = _parser().parse_args(arguments)
    if options.compare:
        print(comparison(*(read_answers(path) for path in options.compare)))
        return 0
    from training.tiny_vl.items import SETS

    with asker(options) as ask:
        concurrency = 1 if options.transformers else askers.CONCURRENCY
        answers = ask_all(SETS[options.set](options.count), options.count, ask, concurrency)
    print(report(answers))
    if options.json:
        options.json.write_text("".join(json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in answers))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.tiny_vl.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--server", metavar="URL", help="ask a server that runs (default: one started for this)")
    way.add_argument("--engine", action="store_true", help="ask the library")
    way.add_argument("--transformers", action="store_true", help="ask transformers, one question at a time")
    way.add_argument("--compare", nargs=2, type=Path, metavar="JSON", help="how many answers of two files are equal")
    parser.add_argument(
        "--set",
        choices=("validation", "test"),
        default="test",
        help="validation: the questions that the weights were chosen by (default: test)",
    )
    parser.add_argument("--count", type=positive, default=1000, metavar="N", help="questions (default 1000)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint folder (default: the embedded model)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every answer, a line each")
    return parser


def asker(options: argparse.Namespace) -> AbstractContextManager[askers.Ask]:
    """The way to ask that the flags name."""
    if options.server:
        return askers.of_server(options.server)
    model = options.model or embedded.path()
    if options.engine:
        return askers.of_engine(model, options.dtype)
    if options.transformers:
        return askers.of_transformers(model, options.dtype)
    return askers.of_own_server(model, options.dtype)


def ask_all(items: Iterable[Item], count: int, ask: askers.Ask, concurrency: int) -> list[Answer]:
    """The answers in the order of the items; only the images of `concurrency` items are in memory at once."""
    answers: list[Answer] = []
    num_right = 0
    bar = tqdm(total=count, unit="question", file=sys.stderr, disable=not sys.stderr.isatty())
    with bar, ThreadPoolExecutor(concurrency) as pool:
        for answer in _as_they_come(enumerate(items), ask, pool, concurrency):
            answers.append(answer)
            bar.update()
            num_right += answer.is_right
            bar.set_postfix_str(f"{num_right / len(answers):.1%} right", refresh=False)
    return sorted(answers, key=lambda answer: answer.index)


def _as_they_come(
    numbered: Iterator[tuple[int, Item]], ask: askers.Ask, pool: ThreadPoolExecutor, concurrency: int
) -> Iterator[Answer]:
    def answer(index: int, item: Item) -> Answer:
        return Answer(index, item.kind, item.question, item.answer, ask(item))

    under_way: set[Future[Answer]] = set()
    for index, item in numbered:
        under_way.add(pool.submit(answer, index, item))
        if len(under_way) == concurrency:
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    yield from (future.result() for future in under_way)


def report(answers: list[Answer]) -> str:
    """The table by kind, and what was answered wrong."""
    wrong = [answer for answer in answers if not answer.is_right]
    lines = [f"{answer.kind}: {answer.question!r} expected {answer.expected!r}, got {answer.got!r}" for answer in wrong]
    shares = shares_by_kind((answer.kind, answer.is_right) for answer in answers)
    return "\n".join([table(shares, "right"), *_first(lines, "wrong")])


def comparison(ones: list[Answer], others: list[Answer]) -> str:
    """The table of equal answers by kind, and those that differ."""
    if [(one.question, one.expected) for one in ones] != [(other.question, other.expected) for other in others]:
        raise SystemExit("the files have answers to different questions, expected two of the same --set and --count")
    pairs = list(zip(ones, others, strict=True))
    shares = shares_by_kind((one.kind, is_same(one.got, other.got)) for one, other in pairs)
    lines = [
        f"{one.kind}: {one.question!r} expected {one.expected!r}, got {one.got!r} and {other.got!r}"
        for one, other in pairs
        if not is_same(one.got, other.got)
    ]
    return "\n".join([table(shares, "equal"), *_first(lines, "different")])


def _first(lines: list[str], what: str) -> list[str]:
    if not lines:
        return []
    rest = [f"... and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
    return ["", f"{what}:", *lines[:MAX_SHOWN], *rest]


def read_answers(path: Path) -> list[Answer]:
    """What --json wrote."""
    return [Answer(**json.loads(line)) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
