"""A server on a port of its own, in a thread of the test, in front of a tiny model or of a script."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import openai
import pytest
import uvicorn
from tiny_checkpoint import write_chat_model, write_vision_model

from tilewright.engine.engine import Engine
from tilewright.ops.native import kernels
from tilewright.server.api.handler import ApiHandler
from tilewright.server.http.app import create_app
from tilewright.server.http.connections import server_config
from tilewright.server.http.settings import ServerSettings
from tilewright.server.link.backend import AnswerDelta, Ended, ModelInfo, Started
from tilewright.server.link.remote import LocalBackend
from tilewright.types import Timings


@pytest.fixture(autouse=True)
def one_thread():
    """So little is computed that a second thread would only be waited for."""
    kernels.set_num_threads(1)
    yield
    kernels.set_num_threads(0)


class Running:
    """A server that runs: its address, its ApiHandler, and clients for it."""

    def __init__(self, url: str, handler: ApiHandler, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.handler = handler
        self.loop = loop

    def client(self, **options) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": 60, **options}
        )


@contextlib.contextmanager
def serving(
    make_backend: Callable,
    settings: ServerSettings | None = None,
    port: int = 0,
    make_diffusion: Callable = lambda: None,
) -> Iterator[Running]:
    """A Running server whose backends are made on the server's event loop; port 0: any free one."""
    started: list[Running] = []
    ready = threading.Event()
    server: list[uvicorn.Server] = []

    async def main() -> None:
        backends, image_backends = ([one] if one else [] for one in (make_backend(), make_diffusion()))
        handler = ApiHandler(settings or ServerSettings(), backends, image_backends)
        listener = socket.create_server(("127.0.0.1", port))
        server.append(uvicorn.Server(server_config(create_app(handler), handler.settings, handler.metrics)))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        started.append(Running(url, handler, asyncio.get_running_loop()))
        ready.set()
        await server[0].serve(sockets=[listener])
        await handler.close()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield started[0]
    finally:
        server[0].should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="session")
def chat_engine(chat_folder):
    with Engine(chat_folder, pack_cache=False, kv_memory="64MB", max_sequences=8) as engine:
        yield engine


@pytest.fixture(scope="session")
def vision_engine(tmp_path_factory):
    folder = write_vision_model(tmp_path_factory.mktemp("vision"))
    with Engine(folder, pack_cache=False, kv_memory="64MB", max_sequences=8) as engine:
        yield engine


@pytest.fixture(scope="session")
def chat_server(chat_engine):
    with serving(lambda: LocalBackend(chat_engine)) as running:
        yield running


@pytest.fixture(scope="session")
def vision_server(vision_engine):
    with serving(lambda: LocalBackend(vision_engine)) as running:
        yield running


class ScriptedBackend:
    """Answers every request with the same pieces of text, or as slowly as a test wants it."""

    num_restarts = 0

    def __init__(
        self,
        pieces=("Hello", " there"),
        *,
        name="scripted",
        template=None,
        accepts=(),
        opens_reasoning=False,
        holds_back=False,
    ) -> None:
        self.pieces = list(pieces)
        self.model = ModelInfo(name, 4096, 8, template, accepts)
        self.opens_reasoning = opens_reasoning
        self.holds_back = holds_back  # nothing comes after the first piece
        self.requests = []
        self.num_aborted = 0
        self.error: Exception | None = None

    def submit(self, request, listener):
        if self.error is not None:
            raise self.error
        self.requests.append(request)
        loop = asyncio.get_running_loop()
        events = [Started(3, self.opens_reasoning)]
        events += [AnswerDelta(0, piece, 1) for piece in self.pieces[: 1 if self.holds_back else None]]
        if not self.holds_back:
            events += [AnswerDelta(0, "", 1, "stop"), Ended(3, 0, len(self.pieces) + 1, Timings(0.0, 0.1, 0.2))]
        for event in events:
            loop.call_soon(listener, event)

        def abort() -> None:
            self.num_aborted += 1

        return abort

    async def stats(self):
        if self.error is not None:
            raise self.error
        return {"step_age_s": 0.0, "num_replicas": 1}

    async def close(self) -> None:
        pass


@pytest.fixture
def scripted():
    """Makes servers that answer from a script: scripted(pieces, settings, **options) -> (Running, ScriptedBackend)."""
    with contextlib.ExitStack() as stack:

        def make(pieces=("Hello", " there"), settings=None, **options):
            backend = ScriptedBackend(pieces, **options)
            return stack.enter_context(serving(lambda: backend, settings)), backend

        yield make


@pytest.fixture(scope="module")
def browser():
    """A Chromium for the tests of the page."""
    from page_browser import launched

    with launched() as browser:
        yield browser


@pytest.fixture
def visits(browser):
    """Pages in it; at the end, that nothing went wrong in any of them."""
    from page_browser import Visits

    visits = Visits(browser)
    yield visits
    visits.close()


@pytest.fixture
def held():
    """Makes servers that hold an answer back: held(pieces, settings, **options) -> (Running, HeldBackend)."""
    from page_browser import HeldBackend

    with contextlib.ExitStack() as stack:

        def make(pieces=("Hello", " there"), settings=None, **options):
            backend = HeldBackend(pieces, **options)
            return stack.enter_context(serving(lambda: backend, settings)), backend

        yield make
