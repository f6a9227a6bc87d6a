"""The process that watches over the engine's."""

import asyncio
import subprocess

import pytest
from tiny_checkpoint import write_text_model

from tilewright.process.supervisor import ProcessRefused
from tilewright.server.http.errors import as_api_error
from tilewright.server.http.respond import shutting_down
from tilewright.server.link import remote
from tilewright.server.link.backend import EngineRequest
from tilewright.server.link.remote import RemoteBackend
from tilewright.types import EngineUnavailable, RequestError


def no_more_files(*arguments, **options):
    raise OSError(24, "Too many open files")


def test_no_process_can_be_started(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", no_more_files)
    with pytest.raises(ProcessRefused, match="Too many open files"):
        asyncio.run(asyncio.wait_for(RemoteBackend({}).start(), 30))


def test_it_keeps_restarting_once_it_was_ready(tmp_path, monkeypatch):
    """A lost engine that cannot be replaced at once is replaced later."""
    folder = write_text_model(tmp_path)

    async def live():
        limits = {"max_bytes": 10**6}
        backend = RemoteBackend(
            {"model": str(folder), "kv_memory": "16MB", "pack_cache": False, "media_limits": limits}
        )
        await asyncio.wait_for(backend.start(), 60)
        with pytest.raises(RequestError, match="nested too deeply"):
            deep = {}
            for _ in range(5000):
                deep = {"in": deep}
            backend.submit(EngineRequest(text="x", template_arguments=deep), lambda event: None)
        working = subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", no_more_files)
        backend._process.kill()
        while backend.num_restarts < 1:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineUnavailable):
            backend.submit(EngineRequest(text="x"), lambda event: None)
        await asyncio.sleep(0.6)  # one try that fails
        monkeypatch.setattr(subprocess, "Popen", working)
        while not backend.is_ready:
            await asyncio.sleep(0.05)
        assert backend.num_restarts >= 2
        await backend.close()

    asyncio.run(asyncio.wait_for(live(), 120))


def test_a_request_cut_off_by_the_end_of_the_server_is_told_so():
    """Whether the engine's end is seen first or the server's own."""
    backend, events = RemoteBackend({}), []
    backend._listeners["one"] = events.append
    backend._is_closing = True
    backend.on_end("status 0")
    (failed,) = events
    error, expected = as_api_error(failed.error()), shutting_down()
    assert (error.status, error.code, error.message) == (503, expected.code, expected.message)


PROCESS = """
import time

def serve(channel, options):
    limits = {"max_context": 8, "max_token_bytes": 8}
    model = {"name": "x", "max_context": 8, "max_sequences": 1, "template": None, "text_limits": limits}
    channel.send({"ready": model, "known_limits": None})
    while (message := channel.receive()) is not None:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            time.sleep(options["pause_s"])
        channel.send({"stats": message["stats"], "values": {"step_age_s": 0.0, "num_replicas": 1}})
"""


class SlowBackend(RemoteBackend):
    """Its process answers after 2 s, in which it computes or sleeps."""

    def __init__(self, pause_s):
        super().__init__({"pause_s": pause_s})
        self._entry = "process_that_is_slow:serve"


# It must not wake just as the query times out.
@pytest.mark.parametrize("pause_s", [0.0, 0.3])
def test_an_engine_too_busy_to_tell_its_stats_is_not_taken_for_one_that_hangs(tmp_path, monkeypatch, pause_s):
    (tmp_path / "process_that_is_slow.py").write_text(PROCESS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(remote, "STATS_TIMEOUT_S", 0.5)

    async def live():
        backend = SlowBackend(pause_s)
        await backend.start()
        try:
            if pause_s:
                with pytest.raises(EngineUnavailable, match=r"did not respond for 0\.5 s"):
                    await backend.stats()
            else:
                ages_s = [(await backend.stats())["step_age_s"] for _ in range(2)]
                assert 0.4 < ages_s[0] < ages_s[1]  # it has been silent since the first query
        finally:
            await backend.close()

    asyncio.run(asyncio.wait_for(live(), 60))
