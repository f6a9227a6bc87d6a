"""The command `batch`: its flags, and a batch from its first look at the files to its last line."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright import engine_flags
from tilewright.host_memory import parse_bytes
from tilewright.inputs.media import MediaLimits
from tilewright.types import RequestError

if TYPE_CHECKING:
    from tilewright.batch.requests import RequestFile
    from tilewright.batch.results import Results
    from tilewright.batch.work import Tally
    from tilewright.engine.engine import Engine
    from tilewright.server.link.backend import ModelInfo

# The user's own, as the library's are; paths are read before the engine sees them.
MEDIA_LIMITS = MediaLimits(allow_paths=False)


def add_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command `batch`."""
    parser = commands.add_parser(
        "batch",
        help="answer a file of requests",
        description="Answers the requests of IN, a file in the form of OpenAI's batches, into OUT: a line for each, in "
        "the order they are done. A request that cannot be served gets a line too, with its status and error. "
        "Stopped or killed, the same command goes on where it was.",
        epilog="""examples:
  tilewright batch questions.jsonl answers.jsonl               by the embedded model, which is tiny
  tilewright batch questions.jsonl answers.jsonl -m ./Qwen3-VL-2B-Instruct
  tilewright batch in.jsonl out.jsonl -m MODEL --errors failed.jsonl
  tilewright batch in.jsonl out.jsonl -m MODEL --name gpt-4o-mini      a file that was made for another model
  tilewright batch in.jsonl out.jsonl -m MODEL --retry-failed

a line of IN:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "What is a tile?"}], "max_tokens": 100}}

exit status: 0 all are answered, 1 some failed, 2 it cannot be run or cannot go on, 70 the engine broke,
130 or 143 a signal stopped it""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("input", metavar="IN", type=Path, help="requests, a line of JSON each")
    parser.add_argument(
        "output", metavar="OUT", type=Path, help="their answers; what it has already is not asked again"
    )
    parser.add_argument("--errors", metavar="FILE", type=Path, help="lines of failed requests go there instead of OUT")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--restart", action="store_true", help="forget what OUT, and the file of --errors, have")
    how.add_argument("--retry-failed", action="store_true", help="ask again what failed in an earlier run")
    parser.add_argument("--name", help="what the requests call the model (default: its folder's name)")
    parser.add_argument(
        "--concurrency", type=engine_flags.positive, metavar="N",
        help="requests under way at once (default: twice --max-sequences)",
    )  # fmt: skip
    parser.add_argument("--max-line", default="128MiB", metavar="SIZE", help="of one request (default 128MiB)")
    parser.add_argument(
        "--allow-private-urls", action="store_true", help="also fetch media from addresses of the local network"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress, only what goes wrong")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell what is going on")
    engine_flags.add_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The exit status."""
    from tilewright.batch.requests import RequestFile
    from tilewright.batch.results import Results
    from tilewright.batch.work import Tally
    from tilewright.server.endpoints import ENDPOINTS

    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.WARNING, format="%(name)s: %(message)s")
    paths = [options.input, options.output, *([options.errors] if options.errors else [])]
    # Links are followed first: a file that is replaced must not take the place of a link to it.
    source, *targets = (path.expanduser().resolve() for path in paths)
    if len({source, *targets}) < len(paths):
        raise RequestError("IN, OUT and the file of --errors must be different files")
    with (
        RequestFile(source, ENDPOINTS, parse_bytes(options.max_line)) as requests,
        Results(targets[0], targets[1] if options.errors else None) as results,
    ):
        if options.restart:
            results.clear()
        tally = Tally()
        answered_by = _take_up(requests, results, tally, drops_failed=options.retry_failed)
        if not options.quiet:
            done = f"{tally.num_done} done already, {tally.num_failed} of them failed"
            print(f"{source}: {len(requests)} requests, {done}", file=sys.stderr)
        if requests.num_done == len(requests):
            return int(tally.num_failed > 0)
        shows_loading = sys.stderr.isatty() and not options.quiet
        # A medium that crashes its decoder fails alone, or it would end the batch each time that is taken up again.
        with engine_flags.open_engine(
            options, progress=shows_loading, isolate_media=True, media_limits=MEDIA_LIMITS
        ) as engine:
            return asyncio.run(_answer_all(options, engine, requests, results, tally, answered_by))


def _take_up(requests: RequestFile, results: Results, tally: Tally, *, drops_failed: bool) -> set[str]:
    """Marks and counts what is done already; the names of the models that answered."""
    answered_by: set[str] = set()
    for path, entry in results.entries(drops_failed=drops_failed):
        try:
            requests.mark_done(entry.custom_id, entry.id)
        except RequestError as error:
            message = f"{path}, line {entry.line_number}: {error}; choose another OUT, or --restart to begin anew"
            raise RequestError(message) from error
        if entry.status == 200:
            tally.num_answered += 1
            answered_by.add(str(entry.model))
        else:
            tally.num_failed += 1
    return answered_by


async def _answer_all(
    options: argparse.Namespace, engine: Engine, requests: RequestFile, results: Results, tally: Tally,
    answered_by: Collection[str],
) -> int:  # fmt: skip
    """The exit status, when all is done or something ended it."""
    from tilewright.batch.ending import Ending
    from tilewright.batch.paths import PathGate
    from tilewright.batch.progress import Progress
    from tilewright.batch.work import BatchWorkers
    from tilewright.server.link.local import LocalBackend
    from tilewright.server.media.gate import MediaGate, MediaPolicy

    backend = LocalBackend(engine)
    own_name = backend.model.name
    model = replace(backend.model, name=options.name or own_name)
    _check_names(requests, answered_by, model, own_name)
    # Whoever runs this may read the machine's files anyway.
    policy = MediaPolicy(MEDIA_LIMITS, allow_private_addresses=options.allow_private_urls, folders=(Path("/"),))
    gate = MediaGate(policy)
    crew = BatchWorkers(backend, model, PathGate(gate, requests.path.parent), results.append, tally)
    concurrency = min(options.concurrency or 2 * model.max_sequences, len(requests) - requests.num_done)
    progress = Progress(tally, len(requests), engine.stats, is_quiet=options.quiet)
    working = asyncio.create_task(crew.work(requests.left(), concurrency))
    showing = asyncio.create_task(progress.show())
    with Ending(working) as ending:
        try:
            await working
        except asyncio.CancelledError:
            if not ending.status:
                raise
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
            await gate.close()
            await asyncio.to_thread(engine.close)  # while this loop still takes what the engine's thread tells
    results.sync()
    if not options.quiet:
        print(progress.summary(), file=sys.stderr)
    if ending.status:
        print("tilewright: stopped; the same command goes on with the rest", file=sys.stderr)
    return ending.status or int(tally.num_failed > 0)


def _check_names(requests: RequestFile, answered_by: Collection[str], model: ModelInfo, own_name: str) -> None:
    """RequestError where requests want another model, or have answers of another."""
    for asked, line_number in requests.models.items():
        if asked and not model.is_meant_by(asked) and asked != own_name:
            raise RequestError(
                f"{requests.path}, line {line_number}: model is {asked[:200]!r}, this one is {model.name!r}; "
                f"--name {asked[:200]!r} lets it answer"
            )
    for other in answered_by:
        if other != model.name:
            raise RequestError(
                f"OUT has answers of {other[:200]!r}, this model is {model.name!r}; choose another OUT, --restart to "
                f"begin anew, or --name {other[:200]!r} if it is the same"
            )
