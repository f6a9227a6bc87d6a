"""Requests of all kinds, 32 at once, on the whole server; and streams beside clients that misbehave."""

import asyncio
import os
import statistics
import time

import pytest
import soak
import soak_beside
import soak_images
from processes import family_of, memory_bytes
from serve_process import ServerProcess
from tiny_checkpoint import write_omni_model, write_vision_model
from tiny_pipelines import z_image_pipeline

CONCURRENCY = 32


@pytest.mark.parametrize("num_requests", [600, pytest.param(2000, marks=pytest.mark.long)])
def test_soak(tmp_path, num_requests):
    server = ServerProcess(write_omni_model(tmp_path), "--max-body", "200KB", "--max-sequences", "16")
    try:
        requests = soak.make_requests(num_requests, seed=1)
        distinct = {request.body: request for request in requests if request.status == 200}
        alone = asyncio.run(soak.run(server.url, list(distinct.values()), concurrency=1))
        assert not alone.wrong
        # What grows up to its size: pages that were never touched, decoders, and steps, of which 128 shapes are
        # recorded and kept. Which shapes come depends on what else the machine does: all requests once, not some.
        asyncio.run(soak.run(server.url, requests, CONCURRENCY))
        samples = []

        def sample():
            samples.append(sum(memory_bytes(pid) for pid in family_of(server.process.pid)))

        together = asyncio.run(soak.run(server.url, requests, CONCURRENCY, after_each=sample))
        assert not together.wrong, together.wrong[:5]
        assert together.answers == alone.answers
        assert sum(together.statuses.values()) == num_requests
        deadline = time.monotonic() + 20
        while server.metric("tilewright_kv_pages_used") or server.metric("tilewright_requests_in_flight"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert server.metric("tilewright_requests_running") == server.metric("tilewright_requests_waiting") == 0
        quarter = num_requests // 4
        first, last = statistics.median(samples[:quarter]), statistics.median(samples[-quarter:])
        assert last <= 1.02 * first, (first, last)
    finally:
        server.end()


def test_streams_beside_clients_that_misbehave(tmp_path):
    """32 at once. `python tests/server/soak_beside.py` is for more."""
    server = ServerProcess(write_vision_model(tmp_path), "--max-sequences", "16")
    try:
        pid = server.process.pid
        alone = asyncio.run(soak_beside.run_streams(server.url, pid, 24, 8))
        assert not alone.wrong, alone.wrong[:3]
        with soak_beside.Misbehaviour(server.url, 2, 32, 4).under_way() as misbehaviour:
            beside = asyncio.run(soak_beside.run_streams(server.url, pid, 64, 32, seconds=3))
        assert not beside.wrong, beside.wrong[:3]
        assert beside.answers == alone.answers
        long = {status: count for (kind, status), count in misbehaviour.statuses.items() if kind == "20 MB prompt"}
        assert list(long) == [400] and set(misbehaviour.errors) == {"context_length_exceeded"}
        # Two bodies of 20 MB, as bytes and as text; tokenized they would take 3 GB each.
        assert max(beside.memory) < max(alone.memory) + 600 * 2**20
        assert server.status() == 200
    finally:
        server.end()


def test_chat_and_images_leave_nothing_behind(tmp_path):
    """The whole server, its engine and its diffusion worker. For longer: python tests/server/soak_kills.py."""
    z_image_pipeline(tmp_path / "tiny-z-image")
    (temporary := tmp_path / "temporary").mkdir()
    flags = ("--image-model", str(tmp_path / "tiny-z-image"), "--image-low-memory")
    server = ServerProcess(write_vision_model(tmp_path / "chat"), *flags, TMPDIR=str(temporary))

    def held():
        """Memory apart: it still grows up to the size of what is cached. Streams that were left end within a step."""
        deadline = time.monotonic() + 30
        while any(soak_images.in_use(server.url).values()):
            assert time.monotonic() < deadline, soak_images.in_use(server.url)
            time.sleep(0.05)
        found = soak_images.left_behind(server.process.pid)
        return {name: found[name] for name in ("processes", "threads", "files", "shared")}

    try:
        client = server.client()
        assert [model.id for model in client.models.list()] == ["chat", "tiny-z-image"]
        assert len(family_of(server.process.pid)) == 1 + len(family_of(server.engine_pid()))  # no worker yet
        fields = {"prompt": "a red circle", "size": "32x16", "extra_body": {"seed": 5, "steps": 2}}
        (made,) = client.images.generate(**fields).data
        assert made.settings["model"] == "tiny-z-image"
        *_, last = client.images.generate(**fields, stream=True, partial_images=1)
        assert last.type == "image_generation.completed" and last.b64_json == made.b64_json  # the same seed
        asyncio.run(soak_images.run(server.url, 2 * len(soak_images.KINDS), 8))
        before = held()
        statuses, wrong = asyncio.run(soak_images.run(server.url, 5 * len(soak_images.KINDS), 8, seed=1))
        assert not wrong and statuses.total() == 5 * len(soak_images.KINDS)
        deadline = time.monotonic() + 30
        while any(after > before[name] for name, after in held().items()):  # until idle connections are closed
            assert time.monotonic() < deadline, (before, held())
            time.sleep(0.1)
        assert not list(temporary.rglob("*"))
        family = family_of(server.process.pid)
    finally:
        server.end()
    assert not [pid for pid in family if os.path.exists(f"/proc/{pid}")]
    assert not list(temporary.rglob("*"))
