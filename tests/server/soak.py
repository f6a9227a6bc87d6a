"""Requests of every kind at once, against a server that runs: what is right is answered as it would be alone."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.append(str(Path(__file__).parents[1]))  # where pytest finds the tests' own modules, for commands
from sounds import wav

from tilewright.bench.http_client import Client, HttpError, ServerAddress

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = ("tile", "grout", "kiln", "glaze", "slip", "clay", "wall", "floor", "edge", "square", "corner", "row")


@dataclass(frozen=True)
class Request:
    """A request and what must come of it: a status, or nothing where the client leaves."""

    kind: str
    path: str
    body: bytes
    status: int | None = 200
    leaves_after_bytes: int = 0  # of the answer; 0: reads it all


def image(seed: int, size: int = 32) -> bytes:
    rng = random.Random(seed)
    drawn = Image.new("RGB", (size, size), tuple(rng.randrange(256) for _ in range(3)))
    drawn.putpixel((seed % size, seed % size), (0, 0, 0))
    file = io.BytesIO()
    drawn.save(file, "PNG")
    return file.getvalue()


def part(data: bytes) -> dict:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def sound(seed: int, seconds: float = 1.2) -> bytes:
    """A tone of its own."""
    return wav(np.sin(np.arange(int(seconds * 16_000)) * (0.05 + seed / 90))[:, None] * 0.4, 16_000)


def heard(data: bytes) -> dict:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def bomb() -> bytes:
    """A few bytes that say they are 60,000 x 60,000 pixels."""
    data = bytearray(image(0))
    data[16:24] = (60_000).to_bytes(4, "big") * 2
    return bytes(data)


def text_of(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 12)))


def chat(rng: random.Random, *parts: dict, **options) -> bytes:
    content = [*parts, {"type": "text", "text": text_of(rng)}] if parts else text_of(rng)
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": rng.randrange(1, 24), "seed": 7}
    return json.dumps({**body, "temperature": rng.choice([0, 1]), **options}).encode()


def json_format(schema: dict) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "tile", "schema": schema}}


SCHEMA = {"type": "object", "properties": {"tile": {"enum": ["red", "blue"]}, "large": {"type": "boolean"}},
          "required": ["tile", "large"], "additionalProperties": False}  # fmt: skip
KINDS: dict[str, Callable[[random.Random], Request]] = {
    "text": lambda rng: Request("text", CHAT, chat(rng)),
    "stream": lambda rng: Request("stream", CHAT, chat(rng, stream=True)),
    "several": lambda rng: Request("several", CHAT, chat(rng, n=2, temperature=1)),
    "completion": lambda rng: Request(
        "completion",
        COMPLETIONS,
        json.dumps({"prompt": text_of(rng), "max_tokens": 5, "temperature": 0, "echo": True, "logprobs": 1}).encode(),
    ),
    "image": lambda rng: Request("image", CHAT, chat(rng, part(image(rng.randrange(12))))),
    "images": lambda rng: Request(
        "images", CHAT, chat(rng, part(image(rng.randrange(12))), part(image(rng.randrange(12), 48)))
    ),
    "sound": lambda rng: Request("sound", CHAT, chat(rng, heard(sound(rng.randrange(12))))),
    "sound and image": lambda rng: Request(
        "sound and image", CHAT, chat(rng, heard(sound(rng.randrange(12), 0.4)), part(image(rng.randrange(12))))
    ),
    "no sound": lambda rng: Request("no sound", CHAT, chat(rng, heard(sound(1)[: rng.randrange(1, 44)])), 400),
    "json": lambda rng: Request(
        "json",
        CHAT,
        chat(rng, max_tokens=60, response_format=json_format(SCHEMA)),
    ),
    "regex": lambda rng: Request("regex", CHAT, chat(rng, structured_outputs={"regex": "(ab|cd){2,6}"})),
    "left in mid-stream": lambda rng: Request(
        "left in mid-stream", CHAT, chat(rng, stream=True, max_tokens=400, ignore_eos=True), None, rng.randrange(1, 900)
    ),
    "left before": lambda rng: Request(
        "left before", CHAT, chat(rng, part(image(rng.randrange(12))), max_tokens=400, ignore_eos=True), None, -1
    ),
    "malformed": lambda rng: Request("malformed", CHAT, chat(rng)[: rng.randrange(1, 60)], 400),
    "mistyped": lambda rng: Request("mistyped", CHAT, chat(rng, temperature="warm"), 400),
    "oversized": lambda rng: Request("oversized", CHAT, chat(rng, user="x" * 300_000), 413),
    "too long": lambda rng: Request("too long", COMPLETIONS, json.dumps({"prompt": "tile " * 5000}).encode(), 400),
    "bomb": lambda rng: Request("bomb", CHAT, chat(rng, part(bomb())), 400),
    "truncated": lambda rng: Request("truncated", CHAT, chat(rng, part(image(rng.randrange(12))[:-30])), 400),
    "bad schema": lambda rng: Request(
        "bad schema", CHAT, chat(rng, response_format=json_format({"type": "x"})), 400
    ),
    "private address": lambda rng: Request(
        "private address", CHAT, chat(rng, {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}), 400
    ),
}  # fmt: skip


def make_requests(count: int, seed: int) -> list[Request]:
    """Requests of all kinds in turn, shuffled; each well-formed one comes several times."""
    kinds = list(KINDS)
    requests = [KINDS[kinds[i % len(kinds)]](random.Random(f"{seed} {i % (9 * len(kinds))}")) for i in range(count)]
    random.Random(seed).shuffle(requests)
    return requests


@dataclass
class Outcome:
    """What came of the requests."""

    statuses: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    answers: dict[bytes, object] = field(default_factory=dict)  # of well-formed requests, by body


async def send(client: Client, request: Request) -> tuple[int | None, bytes]:
    """(status, body), or (None, b"") where the client left."""
    if request.leaves_after_bytes < 0:
        sending = asyncio.create_task(_send_all(client, request))
        await asyncio.wait([sending], timeout=0.02)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        return None, b""
    if request.leaves_after_bytes:
        with contextlib.suppress(HttpError):
            async with client.request("POST", request.path, request.body) as response:
                await response.read(request.leaves_after_bytes)
        return None, b""
    return await _send_all(client, request)


async def _send_all(client: Client, request: Request) -> tuple[int, bytes]:
    async with client.request("POST", request.path, request.body) as response:
        return response.status, await response.read(1 << 24)


def said(body: bytes) -> object:
    """What an answer says, without ids and times; streams put together."""
    if not body.startswith(b"data:"):
        document = json.loads(body)
        return [
            (choice.get("message") or choice.get("text"), choice["finish_reason"]) for choice in document["choices"]
        ]
    text, reason = "", None
    for line in body.decode().splitlines():
        if line.startswith("data: {"):
            choice = json.loads(line[6:])["choices"][0]
            text += choice["delta"].get("content") or ""
            reason = choice["finish_reason"]
    return [({"role": "assistant", "content": text}, reason)]


async def run(
    url: str, requests: list[Request], concurrency: int, after_each: Callable[[], None] | None = None
) -> Outcome:
    """Sends all, so many at once."""
    outcome, client, waiting = Outcome(), Client(ServerAddress.parse(url)), iter(requests)

    async def work() -> None:
        for request in waiting:
            status, body = await asyncio.wait_for(send(client, request), 120)
            outcome.statuses[request.kind, status] += 1
            if status != request.status:
                outcome.wrong.append(f"{request.kind}: {status}, expected {request.status}: {body[:300]!r}")
            elif status == 200:
                answer = said(body)
                if outcome.answers.setdefault(request.body, answer) != answer:
                    outcome.wrong.append(f"{request.kind}: {answer}, another time {outcome.answers[request.body]}")
            if after_each:
                after_each()

    await asyncio.gather(*(work() for _ in range(concurrency)))
    client.close()
    return outcome
