"""`tilewright batch`: its flags, and the run."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.flags import engine as engine_flags
from tilewright.flags import replicas
from tilewright.flags.options import positive
from tilewright.host.memory import parse_bytes
from tilewright.inputs.media import MediaLimits
from tilewright.types import RequestError
from tilewright.weights import embedded

if TYPE_CHECKING:
    from tilewright.batch.requests import RequestFile
    from tilewright.batch.results import Results
    from tilewright.batch.work import BatchProgress, Totals
    from tilewright.engine.engine import Engine

# The library's limits: the files are the user's own. The gate reads paths, not the engine.
MEDIA_LIMITS = MediaLimits(allow_paths=False, allow_precomputed=False)


def add_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `batch`."""
    parser = commands.add_parser(
        "batch",
        help="answer a file of requests",
        description="Answers the requests in IN, a file in OpenAI's batch format, and writes a line for each to OUT, "
        "in the order they finish. A request that fails gets a line with its status and error. "
        "After an interruption, run the same command again to continue.",
        epilog="""examples:
  tilewright batch questions.jsonl answers.jsonl               with the embedded model, which is tiny
  tilewright batch questions.jsonl answers.jsonl -m ./Qwen3-VL-2B-Instruct
  tilewright batch in.jsonl out.jsonl -m MODEL --errors failed.jsonl
  tilewright batch in.jsonl out.jsonl -m MODEL --name gpt-4o-mini      a file written for another model
  tilewright batch in.jsonl out.jsonl -m MODEL --retry-failed
  tilewright batch in.jsonl out.jsonl -m MODEL --replicas 8 --ray-address HOST:6379    on the machines of a Ray cluster

a line of IN:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "What is a tile?"}], "max_tokens": 100}}

exit status: 0 all requests succeeded, 1 some failed, 2 the batch cannot run or continue, 70 the engine failed,
130 or 143 stopped by a signal""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("input", metavar="IN", type=Path, help="requests, one JSON object per line")
    parser.add_argument(
        "output", metavar="OUT", type=Path, help="the answers; requests that have an answer in it are skipped"
    )
    parser.add_argument("--errors", metavar="FILE", type=Path, help="write failed requests there instead of OUT")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--restart", action="store_true", help="empty OUT and the file of --errors first")
    how.add_argument("--retry-failed", action="store_true", help="retry requests that failed in an earlier run")
    parser.add_argument("--name", help="the model's name in the requests (default: its folder's name)")
    parser.add_argument(
        "--concurrency", type=positive, metavar="N",
        help="requests in flight per engine (default: twice --max-sequences)",
    )  # fmt: skip
    parser.add_argument("--max-line", default="128MiB", metavar="SIZE", help="size of one request (default 128MiB)")
    parser.add_argument("--allow-private-urls", action="store_true", help="also fetch media from private addresses")
    parser.add_argument(
        "--allow-precomputed", action="store_true",
        help="also accept an encoder's inputs or features (image_features, ...) in place of media",
    )  # fmt: skip
    parser.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")
    engine_flags.add_arguments(parser)
    text = "engines that share the work; IN and the files it names must be at the same paths on all machines"
    replicas.add_arguments(parser, replicas.fixed_count, text)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    replicas.check(options)
    engine_flags.check_model(options.model, options.mmproj)
    from tilewright.batch.requests import RequestFile
    from tilewright.batch.results import Results
    from tilewright.batch.work import Totals
    from tilewright.server.api.endpoints import ENDPOINTS

    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.WARNING, format="%(name)s: %(message)s")
    paths = [options.input, options.output, *([options.errors] if options.errors else [])]
    # Resolve links first: replacing a file must not replace a link to it.
    source, *targets = (path.expanduser().resolve() for path in paths)
    if len({source, *targets}) < len(paths):
        raise RequestError("IN, OUT and the file of --errors must be different files")
    with (
        RequestFile(source, ENDPOINTS, parse_bytes(options.max_line)) as requests,
        Results(targets[0], targets[1] if options.errors else None) as results,
    ):
        if options.restart:
            results.clear()
        totals = Totals()
        answered_by = _resume(requests, results, totals, drops_failed=options.retry_failed)
        if not options.quiet:
            done = f"{totals.num_done} done already, {totals.num_failed} of them failed"
            print(f"{source}: {len(requests)} requests, {done}", file=sys.stderr)
        if requests.num_done == len(requests):
            return int(totals.num_failed > 0)
        if options.replicas is not None:
            return _answer_by_replicas(options, requests, results, totals, answered_by)
        shows_loading = sys.stderr.isatty() and not options.quiet
        # Media are decoded in another process: a crash of the decoder must not end the batch each time it is resumed.
        with engine_flags.open_engine(
            options, progress=shows_loading, isolate_media=True, media_limits=_media_limits(options)
        ) as engine:
            return asyncio.run(_answer_all(options, engine, requests, results, totals, answered_by))


def _media_limits(options: argparse.Namespace) -> MediaLimits:
    return replace(MEDIA_LIMITS, allow_precomputed=options.allow_precomputed)


def _resume(requests: RequestFile, results: Results, totals: Totals, *, drops_failed: bool) -> set[str]:
    """Mark and count the requests that are done; return the names of the models that answered."""
    answered_by: set[str] = set()
    for path, entry in results.entries(drops_failed=drops_failed):
        try:
            requests.mark_done(entry.custom_id, entry.id)
        except RequestError as error:
            message = f"{path}, line {entry.line_number}: {error}; choose another OUT, or --restart to start over"
            raise RequestError(message) from error
        if entry.status == 200:
            totals.num_answered += 1
            answered_by.add(str(entry.model))
        else:
            totals.num_failed += 1
    return answered_by


async def _answer_all(
    options: argparse.Namespace, engine: Engine, requests: RequestFile, results: Results, totals: Totals,
    answered_by: Collection[str],
) -> int:  # fmt: skip
    """Answer all requests until done or interrupted; return the exit status."""
    from tilewright.batch.requests import PathGate
    from tilewright.batch.work import BatchProgress, BatchWorkers
    from tilewright.server.link.remote import LocalBackend
    from tilewright.server.media.gate import MediaGate, MediaPolicy

    backend = LocalBackend(engine)
    model = replace(backend.model, name=options.name or backend.model.name)
    _check_names(requests, answered_by, model.name, backend.model.name)
    # The user who runs this can read the machine's files anyway.
    limits = _media_limits(options)
    policy = MediaPolicy(limits, allow_private_addresses=options.allow_private_urls, folders=(Path("/"),))
    gate = MediaGate(policy)
    workers = BatchWorkers(backend, model, PathGate(gate, requests.path.parent), results.append, totals)
    concurrency = min(options.concurrency or 2 * model.max_sequences, len(requests) - requests.num_done)
    progress = BatchProgress(totals, len(requests), lambda: engine.stats().num_output_tokens, is_quiet=options.quiet)

    async def close() -> None:
        await gate.close()
        await asyncio.to_thread(engine.close)  # while this event loop still receives the engine's events

    return await _finish(options, workers.work(requests.left(), concurrency), close, results, totals, progress)


def _answer_by_replicas(
    options: argparse.Namespace, requests: RequestFile, results: Results, totals: Totals, answered_by: Collection[str]
) -> int:
    """Answer all requests with several engines; return the exit status."""
    from tilewright.batch import ray_data
    from tilewright.batch.work import ENGINE_LOST, BatchProgress, WorkerSettings
    from tilewright.engine.schedule.step import StepLimits
    from tilewright.server.replicas import ray_serving

    engine = engine_flags.engine_options(options)
    own_name = embedded.name_of(engine["model"])
    name = options.name or own_name
    _check_names(requests, answered_by, name, own_name)
    ray_serving.connect(options.ray_address)
    num_workers = options.replicas.most
    settings = WorkerSettings(
        engine,
        name,
        requests.path,
        parse_bytes(options.max_line),
        _media_limits(options),
        options.allow_private_urls,
        ray_serving.num_replica_cpus(options.replica_cpus, num_workers),
        num_workers,
    )
    concurrency = options.concurrency or 2 * (options.max_sequences or StepLimits.max_sequences)
    writer = ray_data.BlockWriter(requests, results.append, totals)
    progress = BatchProgress(totals, len(requests), lambda: totals.num_output_tokens, is_quiet=options.quiet)

    async def close() -> None:
        await asyncio.to_thread(ray_serving.disconnect)

    async def answer() -> int:
        working = ray_data.answer_all(requests, writer, settings, concurrency)
        return await _finish(options, working, close, results, totals, progress)

    try:
        return asyncio.run(answer())
    except ray_data.WorkersLost as error:
        print(f"tilewright: workers were lost: {error}; run the same command again to continue", file=sys.stderr)
        return ENGINE_LOST


async def _finish(
    options: argparse.Namespace, work: Coroutine[Any, Any, None], close: Callable[[], Awaitable[None]],
    results: Results, totals: Totals, progress: BatchProgress,
) -> int:  # fmt: skip
    """Wait until the work is done or interrupted, close, print the summary and return the exit status."""
    from tilewright.batch.work import InterruptHandler

    working = asyncio.create_task(work)
    showing = asyncio.create_task(progress.show())
    with InterruptHandler(working) as interruption:
        try:
            await working
        except asyncio.CancelledError:
            if not interruption.status:
                raise
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
            await close()
    results.sync()
    if not options.quiet:
        print(progress.summary(), file=sys.stderr)
    if interruption.status:
        print("tilewright: stopped; run the same command again to continue", file=sys.stderr)
    return interruption.status or int(totals.num_failed > 0)


def _check_names(requests: RequestFile, answered_by: Collection[str], model: str, own_name: str) -> None:
    """Raise RequestError if requests name a model other than `model`, or OUT has answers of another one."""
    from tilewright.server.link.backend import names_model

    for name, line_number in requests.models.items():
        if name and not names_model(name, model) and name != own_name:
            raise RequestError(
                f"{requests.path}, line {line_number}: model is {name[:200]!r}, this one is {model!r}; "
                f"--name {name[:200]!r} lets it answer"
            )
    for other in answered_by:
        if other != model:
            raise RequestError(
                f"OUT has answers of {other[:200]!r}, this model is {model!r}; choose another OUT, --restart to "
                f"start over, or --name {other[:200]!r} if it is the same"
            )
