"""`tilewright bench serve --images` and `--make-videos`: measures how fast a server makes images or videos."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilewright.bench.http_client import Client, HttpError
from tilewright.bench.report import aligned, write_document
from tilewright.bench.serve.sample import RequestFailure, StreamError, check
from tilewright.bench.serve.summary import PERCENTS, Distribution
from tilewright.bench.serve.workload import WORDS, WorkloadRequest

PATH, VIDEOS_PATH = "/v1/images/generations", "/v1/videos"
POLL_S = 0.1  # between polls of a video's status
MAX_ANSWER_BYTES = 1 << 28
NUM_WORDS = 12  # of a prompt


@dataclass(frozen=True)
class ImageWorkload:
    """The parameters of all requests; None: left to the server."""

    model: str
    size: tuple[int, int] | None = None
    steps: int | None = None
    n: int = 1
    seed: int = 0
    is_plain: bool = False  # only OpenAI's own fields
    makes_videos: bool = False
    num_frames: int | None = None  # of a video

    @property
    def path(self) -> str:
        return VIDEOS_PATH if self.makes_videos else PATH

    def requests(self, numbers: Iterable[int]) -> Iterator[WorkloadRequest]:
        """Return the requests of these numbers; each number has its own prompt and seed, the same in every run."""
        return (self._request(number) for number in numbers)

    def _request(self, number: int) -> WorkloadRequest:
        chance = random.Random(f"{self.seed} {number}")
        body: dict[str, Any] = {"model": self.model, "prompt": " ".join(chance.choices(WORDS, k=NUM_WORDS))}
        if not self.makes_videos:
            body["n"] = self.n
        if self.size is not None:
            body["size"] = f"{self.size[0]}x{self.size[1]}"
        if not self.is_plain:
            own = {"seed": chance.randrange(1 << 31), "steps": self.steps, "num_frames": self.num_frames}
            body |= {name: value for name, value in own.items() if value is not None}
        return WorkloadRequest(number, json.dumps(body).encode(), 0)


@dataclass(frozen=True)
class ImageSample:
    """The measurements of one request. Times are seconds after it was sent, `sent_s` after the run began."""

    number: int
    sent_s: float
    total_s: float
    num_pictures: int = 0
    step_s: float | None = None  # None: the server does not report it
    queued_s: float | None = None
    failure: RequestFailure | None = None


async def send_image(
    client: Client, path: str, request: WorkloadRequest, timeout_s: float, began_s: float, clock: Callable[[], float]
) -> ImageSample:
    """Send a request and return its sample, also if it fails."""
    sent_s, failure, answer = clock() - began_s, None, {}
    read, what = (_read_video, "video") if path == VIDEOS_PATH else (_read, "image")
    try:
        answer = await asyncio.wait_for(read(client, path, request.body), timeout_s)
    except (asyncio.TimeoutError, TimeoutError):
        failure = RequestFailure("timeout", f"no {what} within {timeout_s:g} s")
    except (HttpError, StreamError) as error:
        failure = RequestFailure(error.kind, str(error))
    timings = answer.get("timings") or {}
    return ImageSample(
        request.number,
        sent_s,
        clock() - began_s - sent_s,
        len(answer.get("data", ())),
        timings.get("step_s"),
        timings.get("queued_s"),
        failure,
    )


async def _read(client: Client, path: str, body: bytes) -> dict[str, Any]:
    async with client.request("POST", path, body) as response:
        await check(response)
        data = await response.read(MAX_ANSWER_BYTES)
    try:
        answer = json.loads(data)
        if all(image.get("b64_json") or image.get("url") for image in answer["data"]) and answer["data"]:
            return answer
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    raise StreamError("malformed", "the answer has no images, expected data with b64_json or url")


async def _read_video(client: Client, path: str, body: bytes) -> dict[str, Any]:
    """Create a video, poll until it is done, read its file and delete it, also on cancellation."""
    job = await _object(client, "POST", path, body)
    place = f"{path}/{job['id']}"
    try:
        while job["status"] in ("queued", "in_progress"):
            await asyncio.sleep(POLL_S)
            job = await _object(client, "GET", place)
        if job["status"] != "completed":
            message = (job.get("error") or {}).get("message") or f"the video is {job['status']!r}"
            raise StreamError("not made", str(message))
        async with client.request("GET", f"{place}/content") as response:
            await check(response)
            if not await response.read(MAX_ANSWER_BYTES):
                raise StreamError("malformed", "the video's file is empty")
    finally:
        await _object(client, "DELETE", place)
    return {"data": [job], "timings": job.get("timings")}


async def _object(client: Client, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
    """Send a request about a job and return the job."""
    async with client.request(method, path, body) as response:
        await check(response)
        data = await response.read(MAX_ANSWER_BYTES)
    try:
        answer = json.loads(data)
        if isinstance(answer["id"], str) and (method == "DELETE" or isinstance(answer["status"], str)):
            return answer
    except (ValueError, LookupError, TypeError):
        pass
    raise StreamError("malformed", "the answer is not a video, expected an object with id and status")


@dataclass(frozen=True)
class ImageSummary:
    """The totals of a run, from the first request sent to the last image."""

    num_answered: int
    num_failed: int
    num_pictures: int
    wall_s: float
    requests_per_minute: float
    pictures_per_minute: float
    distributions: dict[str, Distribution]  # e2e, picture (its share of a request), step, queued; in seconds
    failures: dict[str, dict[str, int]]  # kind -> message -> count


def summarise(samples: Sequence[ImageSample]) -> ImageSummary:
    """Return the summary of at least one sample."""
    answered = [sample for sample in samples if not sample.failure]
    wall_s = max(sample.sent_s + sample.total_s for sample in samples) - min(sample.sent_s for sample in samples)
    wall_s = max(wall_s, 1e-9)  # all may fail at once
    failures: dict[str, Counter[str]] = {}
    for sample in samples:
        if sample.failure:
            failures.setdefault(sample.failure.kind, Counter())[sample.failure.message] += 1
    values = {
        "e2e": [sample.total_s for sample in answered],
        "picture": [sample.total_s / sample.num_pictures for sample in answered],
        "step": [sample.step_s for sample in answered if sample.step_s is not None],
        "queued": [sample.queued_s for sample in answered if sample.queued_s is not None],
    }
    spreads = {name: Distribution.of(column) for name, column in values.items()}
    num_pictures = sum(sample.num_pictures for sample in answered)
    return ImageSummary(
        num_answered=len(answered),
        num_failed=len(samples) - len(answered),
        num_pictures=num_pictures,
        wall_s=wall_s,
        requests_per_minute=60 * len(answered) / wall_s,
        pictures_per_minute=60 * num_pictures / wall_s,
        distributions={name: spread for name, spread in spreads.items() if spread is not None},
        failures={kind: dict(counts.most_common()) for kind, counts in failures.items()},
    )


_TITLES = {"e2e": "whole request (E2E)", "picture": "per image", "step": "per step", "queued": "in the queue"}


def as_table(summary: ImageSummary, client_cpu_share: float, noun: str = "image") -> str:
    """Return the run as a table."""
    titles = {**_TITLES, "picture": f"per {noun}"}
    names = ("mean", *(f"p{percent}" for percent in PERCENTS), "max")
    rows = [("", *names, "unit")]
    for name, spread in summary.distributions.items():
        rows.append((titles[name], *(f"{getattr(spread, key):.4g}" for key in names), "s"))
    lines = [*aligned(rows, left=(0, len(rows[0]) - 1)), ""] if summary.distributions else []
    lines.append(
        f"{summary.num_answered} answered, {summary.num_failed} failed in {summary.wall_s:.1f} s: "
        f"{summary.requests_per_minute:.3g} requests and {summary.pictures_per_minute:.3g} {noun}s a minute"
    )
    for kind, messages in summary.failures.items():
        lines.append(f"{sum(messages.values())} failed, {kind}:")
        lines += [f"  {count} x {message}" for message, count in messages.items()]
    lines.append(f"the client used {client_cpu_share:.2%} of a CPU")
    return "\n".join(lines)


def write_json(path: Path, summary: ImageSummary, samples: Sequence[ImageSample], about: dict[str, Any]) -> None:
    """Write the run, all its samples, and `about`: the server and the machine."""
    totals = asdict(summary)
    document = {"figures": totals.pop("distributions"), "totals": totals, "samples": [asdict(one) for one in samples]}
    write_document(path, about | document)
