"""`tilewright bench serve`: its flags, and the run."""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.bench.report import check_outputs, load_average, size
from tilewright.flags.options import natural, positive
from tilewright.types import RequestError

if TYPE_CHECKING:  # imported when the benchmark runs: --help is fast
    from tilewright.bench.serve.images import ImageWorkload
    from tilewright.bench.serve.run import ClosedLoop, OpenLoop
    from tilewright.bench.serve.workload import Workload, WorkloadRequest

URL = "http://127.0.0.1:8000"
CONCURRENCY = 8
NUM_REQUESTS = 64
EXAMPLES = """examples:
  tilewright bench serve                                        a server on this machine, 8 requests at once
  tilewright bench serve --pictures 1 --concurrency 4           each with an image of its own
  tilewright bench serve http://server:8000 --rate 2 --seconds 60 --goodput ttft:2.0,itl:0.2
  tilewright bench serve --videos 1 --video-frames 8 --same-media --json serve.json --plot serve.png
  tilewright bench serve --extra '{"chat_template_kwargs": {"enable_thinking": false}}'
  tilewright bench serve --images --image-size 512x512 --steps 4 --concurrency 2 --requests 8
  tilewright bench serve --make-videos --image-size 832x480 --num-frames 17 --concurrency 1 --requests 4
  OPENAI_API_KEY=... tilewright bench serve https://example.org --model M --plain"""


def add_arguments(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `serve`."""
    parser = subparsers.add_parser(
        "serve",
        help="measure an OpenAI-compatible server: latencies and throughput",
        description="Measures any OpenAI-compatible server from outside. Prompts, images and videos are made from a "
        "seed, the same for every server, before the clock starts; answers are streamed, with the requested length.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", nargs="?", default=URL, metavar="URL", help=f"the server's address (default {URL})")
    parser.add_argument("--model", metavar="NAME", help="default: the first of /v1/models")
    parser.add_argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY, which does not show in ps")
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="default: chat")
    _add_load(parser)
    _add_prompts(parser)
    _add_media(parser)
    _add_images(parser)
    parser.add_argument("--goodput", metavar="LIMITS", help="limits of ttft, itl, tpot, e2e in s: ttft:2.0,itl:0.1")
    parser.add_argument("--no-limits", action="store_true", help="do not measure this machine before and after")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results of every request, and the machine")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the results (needs matplotlib)")
    parser.set_defaults(run=run)


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    pace = group.add_mutually_exclusive_group()
    text = f"requests in flight at any time (default {CONCURRENCY})"
    pace.add_argument("--concurrency", type=positive, default=CONCURRENCY, metavar="N", help=text)
    text = "send R requests per second instead, at random times, regardless of answers"
    pace.add_argument("--rate", type=_above_zero, metavar="R", help=text)
    text = "with --rate: 1 is a Poisson process (default), less is more bursty, more is more even"
    group.add_argument("--burstiness", type=_above_zero, default=1.0, metavar="B", help=text)
    text = f"number of requests (default {NUM_REQUESTS}); with --seconds: the maximum"
    group.add_argument("--requests", type=positive, metavar="N", help=text)
    group.add_argument("--seconds", type=_above_zero, metavar="S", help="send no request after S seconds")
    text = "requests before the measured ones (default: --concurrency; 1 with --rate)"
    group.add_argument("--warmup", type=natural, metavar="N", help=text)
    text = "timeout of a whole answer (default 600)"
    group.add_argument("--timeout-s", type=_above_zero, default=600.0, metavar="S", help=text)


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts and answers")
    text = "words of a prompt, about a token each: a number or a range such as 64-256 (default 128)"
    group.add_argument("--prompt-tokens", type=_range, default=(128, 128), metavar="N", help=text)
    text = "tokens of an answer: a number or a range such as 16-128 (default 64)"
    group.add_argument("--output-tokens", type=_range, default=(64, 64), metavar="N", help=text)
    text = "words of a common prefix of all prompts (default 0)"
    group.add_argument("--shared-prefix-tokens", type=natural, default=0, metavar="N", help=text)
    group.add_argument("--system", default="", metavar="TEXT", help="a system message")
    group.add_argument("--temperature", type=_natural_float, default=0.0, metavar="T", help="default 0")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of prompts, media and times (default 0)")
    text = "only OpenAI's fields: without ignore_eos and min_tokens, so answers may be shorter"
    group.add_argument("--plain", action="store_true", help=text)
    text = "additional fields of every request's body; null removes one"
    group.add_argument("--extra", type=_object, default={}, metavar="JSON", help=text)


def _add_media(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("media", "Drawn from the seed; different in each request.")
    group.add_argument("--pictures", type=natural, default=0, metavar="N", help="per request (default 0)")
    text = "default 512x512"
    group.add_argument("--picture-size", type=size, default=(512, 512), metavar="WxH", help=text)
    group.add_argument("--picture-format", choices=("jpeg", "png"), default="jpeg", help="default: jpeg")
    group.add_argument("--videos", type=natural, default=0, metavar="N", help="per request (default 0)")
    text = "default 320x240"
    group.add_argument("--video-size", type=size, default=(320, 240), metavar="WxH", help=text)
    text = "frames of a video, two per second (default 16)"
    group.add_argument("--video-frames", type=positive, default=16, metavar="N", help=text)
    text = "sounds per request (default 0)"
    group.add_argument("--audio", dest="sounds", type=natural, default=0, metavar="N", help=text)
    text = "seconds of a sound (default 10)"
    group.add_argument("--audio-seconds", dest="sound_seconds", type=_above_zero, default=10.0, metavar="S", help=text)
    text = "the same media in every request, to measure caches"
    group.add_argument("--same-media", "--same-picture", action="store_true", help=text)


def _add_images(parser: argparse.ArgumentParser) -> None:
    text = "Measures /v1/images/generations or /v1/videos instead of answers."
    group = parser.add_argument_group("making images and videos", text)
    kind = group.add_mutually_exclusive_group()
    kind.add_argument("--images", action="store_true", help="make images; prompts are random words")
    kind.add_argument("--make-videos", action="store_true", help="make videos: created, polled, read and deleted")
    text = "default: the model's"
    group.add_argument("--image-size", type=size, metavar="WxH", help=text)
    group.add_argument("--steps", type=positive, metavar="N", help=text)
    group.add_argument("--images-per-request", type=positive, default=1, metavar="N", help="default 1")
    text = "frames of a video (default: the model's)"
    group.add_argument("--num-frames", type=positive, metavar="N", help=text)


def _above_zero(text: str) -> float:
    value = _natural_float(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _natural_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return value


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, expected 128 or 64-256, say")
    return int(match[1]), int(match[2] or match[1])


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError('it is not a JSON object, expected one such as {"top_p": 0.9}')
    return found


def run(options: argparse.Namespace) -> int:
    """Run the benchmark; return 0, or 1 if no request was answered."""
    from tilewright.bench.http_client import Client, ServerAddress
    from tilewright.bench.serve import report
    from tilewright.bench.serve.run import first_model, is_here, measure, measure_limits
    from tilewright.bench.serve.summary import parse_goodput, summarise
    from tilewright.process import run_loop

    if options.images or options.make_videos:
        return _run_images(options)
    check_outputs(options)
    server = ServerAddress.parse(options.url)
    limits_s = parse_goodput(options.goodput) if options.goodput else None
    client = Client(server, headers(options.api_key))
    workload = workload_of(options, options.model or run_loop(first_model(client, "text")))
    pace = pace_of(options)
    warmup, requests = _make_requests(options, workload, pace)
    is_local = not options.no_limits and is_here(server.host, server.port)
    load = load_average() if is_local else None
    before = [measure_limits()] if is_local else []
    measured = run_loop(measure(client, workload.path, warmup, requests, pace, options.timeout_s))
    after = [measure_limits()] if is_local else []
    if options.seconds and not options.rate and len(measured.samples) == len(requests):
        print(f"tilewright: the last of {len(requests)} requests was sent early: raise --requests", file=sys.stderr)
    summary = summarise(measured.samples, limits_s)
    probes = [one["probe"] for one in before + after]
    print(report.as_table(summary, measured.client_cpu_share, probes))
    if options.json:
        about = _about(options, workload) | {"client_cpu_share": measured.client_cpu_share}
        about["load"] |= {"warmup": len(warmup), "requests": len(requests)}
        if probes:
            about |= {"limits": report.mean_probe(probes), "probes": probes}
            about |= {"machine": before[0]["machine"], "load_average": load}
        report.write_json(options.json, summary, measured.samples, about)
    if options.plot:
        report.write_plot(options.plot, measured.samples, f"{server.url}, {workload.model}")
    return 0 if summary.num_answered else 1


def _run_images(options: argparse.Namespace) -> int:
    """Run the benchmark of images or videos; return 0, or 1 if none was made."""
    from tilewright.bench.http_client import Client, ServerAddress
    from tilewright.bench.serve import images
    from tilewright.bench.serve.run import first_model, is_here, measure, measure_limits
    from tilewright.process import run_loop

    if options.plot or options.goodput:
        raise RequestError("--images and --make-videos do not support --plot and --goodput")
    check_outputs(options)
    server = ServerAddress.parse(options.url)
    client = Client(server, headers(options.api_key))
    noun = "video" if options.make_videos else "image"
    # A worker that has not started lists only images among its modalities.
    modalities = ("video", "image") if options.make_videos else ("image",)
    workload = images.ImageWorkload(
        options.model or run_loop(first_model(client, *modalities)),
        options.image_size,
        options.steps,
        options.images_per_request,
        options.seed,
        options.plain,
        options.make_videos,
        options.num_frames,
    )
    pace = pace_of(options)
    warmup, requests = _make_requests(options, workload, pace)
    is_local = not options.no_limits and is_here(server.host, server.port)
    machine = measure_limits() if is_local else {}
    sending = measure(client, workload.path, warmup, requests, pace, options.timeout_s, images.send_image)
    measured = run_loop(sending)
    summary = images.summarise(measured.samples)
    print(images.as_table(summary, measured.client_cpu_share, noun))
    if options.json:
        bench = "serve videos" if options.make_videos else "serve images"
        about = _about(options, workload) | {"bench": bench, "client_cpu_share": measured.client_cpu_share}
        about["load"] |= {"warmup": len(warmup), "requests": len(requests)}
        images.write_json(options.json, summary, measured.samples, about | machine)
    return 0 if summary.num_answered else 1


def headers(api_key: str | None) -> dict[str, str]:
    """Return a header with the given API key, or with that of the environment, if any."""
    from tilewright import config

    key = api_key or config.current().openai_api_key
    if key and not re.fullmatch(r"[!-~]+", key):
        raise RequestError("the API key has characters that no HTTP header may have, expected ASCII without spaces")
    return {"Authorization": f"Bearer {key}"} if key else {}


def pace_of(options: argparse.Namespace) -> ClosedLoop | OpenLoop:
    """Return the load that the flags describe."""
    from tilewright.bench.serve.run import ClosedLoop, OpenLoop, arrivals

    if options.rate is None:
        return ClosedLoop(options.concurrency, options.seconds)
    count = options.requests or (None if options.seconds else NUM_REQUESTS)
    return OpenLoop(arrivals(options.rate, options.burstiness, options.seed, count, options.seconds))


def num_requests(options: argparse.Namespace, pace: ClosedLoop | OpenLoop) -> int:
    """Return the number of requests to prepare."""
    from tilewright.bench.serve.run import OpenLoop

    if isinstance(pace, OpenLoop):
        return len(pace.due_s)
    if options.requests or not options.seconds:
        return options.requests or NUM_REQUESTS
    return math.ceil(pace.concurrency * (options.seconds + 1))  # enough if answers take at least a second


def workload_of(options: argparse.Namespace, model: str) -> Workload:
    """Return the workload that the flags describe."""
    from tilewright.bench.serve.workload import Workload

    names = Workload.__dataclass_fields__.keys() - {"model", "is_plain"}
    return Workload(model, is_plain=options.plain, **{name: getattr(options, name) for name in names})


def _make_requests(
    options: argparse.Namespace, workload: Workload | ImageWorkload, pace: ClosedLoop | OpenLoop
) -> tuple[list[WorkloadRequest], list[WorkloadRequest]]:
    """Return the requests of the warm-up and the measured ones."""
    from tqdm import tqdm

    num_warmup = options.warmup
    if num_warmup is None:
        num_warmup = 1 if options.rate else options.concurrency
    # Numbers below 0 are the warm-up, so that no measured request is sent twice.
    numbers = range(-num_warmup, num_requests(options, pace))
    progress = tqdm(numbers, desc="making requests", file=sys.stderr, leave=False, disable=not sys.stderr.isatty())
    made = list(workload.requests(progress))
    return made[:num_warmup], made[num_warmup:]


def _about(options: argparse.Namespace, workload: Workload | ImageWorkload) -> dict[str, Any]:
    from tilewright import __version__

    load = ("rate", "burstiness", "seconds", "timeout_s")
    return {
        "bench": "serve",
        "url": options.url,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "workload": asdict(workload),
        "load": {name: getattr(options, name) for name in load}
        | {"concurrency": None if options.rate else options.concurrency},
        "versions": {"tilewright": __version__, "python": platform.python_version()},
    }
