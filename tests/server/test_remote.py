"""The process that watches over the engine's."""

import asyncio
import subprocess

import pytest
from tiny_checkpoint import write_text_model

from tilewright.server.link.backend import EngineRequest, EngineUnavailable
from tilewright.server.link.remote import RemoteBackend
from tilewright.server.link.supervisor import EngineRefused
from tilewright.types import RequestError


def no_more_files(*arguments, **options):
    raise OSError(24, "Too many open files")


def test_no_process_can_be_started(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", no_more_files)
    with pytest.raises(EngineRefused, match="Too many open files"):
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
            backend.submit(EngineRequest(text="x", template_args=deep), lambda event: None)
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
