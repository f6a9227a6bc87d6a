"""Chat and images mixed, against a server that runs; nothing may be left behind. `soak_kills` asks for the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import urllib.request
from collections import Counter
from pathlib import Path

from processes import family_of, memory_bytes

from tilewright.bench.http_client import Client, HttpError, ServerAddress

CHAT, IMAGES, EDITS, VIDEOS = "/v1/chat/completions", "/v1/images/generations", "/v1/images/edits", "/v1/videos"
MAX_BYTES = 1 << 24


def image_body(rng, **fields):
    prompt = f"a tile, number {rng.randrange(8)}"
    return {"prompt": prompt, "seed": rng.randrange(8), "steps": 2, "size": "64x64", **fields}


def chat_body(rng, **fields):
    question = {"role": "user", "content": f"What is tile {rng.randrange(8)}?"}
    return {"messages": [question], "max_tokens": 8, "seed": 1, **fields}


# Kind -> (path, body, the status it must have; None: the client leaves after that many bytes).
KINDS = {
    "chat": lambda rng: (CHAT, chat_body(rng), 200),
    "chat stream": lambda rng: (CHAT, chat_body(rng, stream=True), 200),
    "chat, left": lambda rng: (CHAT, chat_body(rng, stream=True, max_tokens=200), None),
    "image": lambda rng: (IMAGES, image_body(rng), 200),
    "two images": lambda rng: (IMAGES, image_body(rng, n=2, output_format="jpeg"), 200),
    "by URL": lambda rng: (IMAGES, image_body(rng, response_format="url"), 200),
    "stream": lambda rng: (IMAGES, image_body(rng, stream=True, partial_images=1, progress=True), 200),
    "stream, left": lambda rng: (IMAGES, image_body(rng, stream=True, progress=True, steps=8), None),
    "wrong size": lambda rng: (IMAGES, image_body(rng, size="33x16"), 400),
    "wrong edit": lambda rng: (EDITS, image_body(rng), 400),
    "wrong video": lambda rng: (VIDEOS, {"prompt": "tile"}, 400),
}


async def send(client, kind, seed):
    """(status, what is wrong or None)."""
    path, body, expected = KINDS[kind](random.Random(seed))
    data = json.dumps(body).encode()
    if expected is None:
        with contextlib.suppress(HttpError):
            async with client.request("POST", path, data) as response:
                await response.read(random.Random(seed).randrange(1, 200))
        return None, None
    async with client.request("POST", path, data) as response:
        status, answer = response.status, await response.read(MAX_BYTES)
    if status == 429:  # the queue is full: again later, as a client does
        await asyncio.sleep(0.2)
        return await send(client, kind, seed)
    if status != expected:
        return status, f"{kind}: {status}, expected {expected}: {answer[:300]!r}"
    if kind == "by URL":
        url = json.loads(answer)["data"][0]["url"]
        async with client.request("GET", "/" + url.split("/", 3)[3]) as response:
            if response.status != 200 or not (await response.read(MAX_BYTES)).startswith(b"\x89PNG"):
                return response.status, f"{url}: {response.status}"
    return status, None


async def run(url, num_requests, concurrency, seed=0):
    """How often each kind had each status, and what was wrong."""
    client, kinds = Client(ServerAddress.parse(url)), list(KINDS)
    statuses, wrong = Counter(), []
    waiting = iter([(kinds[i % len(kinds)], f"{seed} {i % 99}") for i in range(num_requests)])

    async def work():
        for kind, one_seed in waiting:
            status, problem = await asyncio.wait_for(send(client, kind, one_seed), 300)
            statuses[kind, status] += 1
            if problem:
                wrong.append(problem)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    client.close()
    return statuses, wrong


def left_behind(pid):
    """What a server and all below it hold: processes, threads, open files, mapped shared memory, bytes of memory."""
    pids = family_of(pid)
    held = dict.fromkeys(("threads", "files", "shared"), 0)
    for one in pids:
        with contextlib.suppress(OSError):
            held["threads"] += len(os.listdir(f"/proc/{one}/task"))
            held["files"] += len(os.listdir(f"/proc/{one}/fd"))
            maps = Path(f"/proc/{one}/maps").read_text().splitlines()
            held["shared"] += sum("/dev/shm/" in line or "/memfd:" in line for line in maps)
    return {"processes": len(pids), **held, "memory": sum(map(memory_bytes, pids))}


IN_USE = ("kv_pages_used", "requests_in_flight", "requests_running", "requests_waiting", "requests_preparing",
          "pictures_running", "pictures_waiting", "picture_worker_restarts_total")  # fmt: skip


def in_use(url):
    """What /metrics tells of requests, pages and queues: all of it is 0 when nothing is asked."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        values = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line[0] != "#")
    return {name: float(values[f"tilewright_{name}"]) for name in IN_USE}
