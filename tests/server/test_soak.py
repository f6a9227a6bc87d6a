"""2,000 requests of all kinds, 32 at once, on the whole server."""

import asyncio
import os
import statistics
import time
import urllib.request
from pathlib import Path

import soak
from serve_process import ServerProcess
from tiny_checkpoint import write_vision_model

NUM_REQUESTS = 2000
CONCURRENCY = 32
NUM_WARMING = 1000  # steps of 128 shapes are recorded and kept: until they are, memory grows


def family_of(pid):
    """A process and all below it."""
    children = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                parent = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(name))
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def memory_bytes(pid):
    """What is resident of a process."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(text.split("VmRSS:")[1].split()[0]) * 1024


def metric(url, name):
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        values = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line[0] != "#")
    return float(values[name])


def test_soak(tmp_path):
    server = ServerProcess(write_vision_model(tmp_path), "--max-body", "200KB", "--max-sequences", "16")
    try:
        requests = soak.make_requests(NUM_REQUESTS, seed=1)
        distinct = {request.body: request for request in requests if request.status == 200}
        alone = asyncio.run(soak.run(server.url, list(distinct.values()), concurrency=1))
        assert not alone.wrong
        # What grows up to its size: pages that were never touched, recorded steps, decoders.
        asyncio.run(soak.run(server.url, requests[:NUM_WARMING], CONCURRENCY))
        samples = []

        def sample():
            samples.append(sum(memory_bytes(pid) for pid in family_of(server.process.pid)))

        together = asyncio.run(soak.run(server.url, requests, CONCURRENCY, after_each=sample))
        assert not together.wrong, together.wrong[:5]
        assert together.answers == alone.answers
        assert sum(together.statuses.values()) == NUM_REQUESTS
        deadline = time.monotonic() + 20
        while metric(server.url, "tilewright_kv_pages_used") or metric(server.url, "tilewright_requests_in_flight"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert (
            metric(server.url, "tilewright_requests_running") == metric(server.url, "tilewright_requests_waiting") == 0
        )
        quarter = NUM_REQUESTS // 4
        first, last = statistics.median(samples[:quarter]), statistics.median(samples[-quarter:])
        assert last <= 1.02 * first, (first, last)
    finally:
        server.end()
