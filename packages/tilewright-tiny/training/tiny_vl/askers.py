"""Ways to ask an item: our server, our library, transformers. Each gives the text of a greedy answer."""

from __future__ import annotations

import collections
import contextlib
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from training.tiny_vl import messages

if TYPE_CHECKING:
    from training.tiny_vl.items import Item

Ask = Callable[["Item"], str]

MAX_TOKENS = 96
CONCURRENCY = 8  # requests under way at the server or the library
TIMEOUT_S = 300.0


@contextlib.contextmanager
def of_server(url: str) -> Iterator[Ask]:
    """Asks a server that runs."""
    address = f"{url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"

    def ask(item: Item) -> str:
        body = {"messages": messages.for_server(item), "temperature": 0, "max_tokens": MAX_TOKENS}
        request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return json.load(response)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{address}: {error}: {error.read().decode()}") from error

    yield ask


@contextlib.contextmanager
def of_own_server(model: Path, dtype: str) -> Iterator[Ask]:
    """Asks a `tilewright serve` that lives as long as this, on any free port of this machine."""
    command = [sys.executable, "-m", "tilewright", "serve", str(model), "--dtype", dtype, "--port", "0"]
    with subprocess.Popen([*command, "--log-format", "json"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = _address(process.stderr)
            # A pipe that nobody reads fills up, and the server would wait.
            threading.Thread(target=collections.deque, args=(process.stderr, 0), daemon=True).start()
            with of_server(url) as ask:
                yield ask
        finally:
            process.terminate()
            process.wait(60)


def _address(log: IO[str]) -> str:
    """Where the server answers, as its log says when it is ready."""
    told = []
    for line in log:
        told.append(line)
        if " answers at " in line:
            return json.loads(line)["message"].split()[-1]
    raise RuntimeError(f"tilewright serve ended before it answered: {''.join(told)}")


@contextlib.contextmanager
def of_engine(model: Path, dtype: str) -> Iterator[Ask]:
    """Asks the library."""
    from tilewright import Engine

    with Engine(model, dtype=dtype, pack_cache=False) as engine:
        yield lambda item: engine.chat(messages.for_engine(item), temperature=0.0, max_tokens=MAX_TOKENS).text


@contextlib.contextmanager
def of_transformers(model: Path, dtype: str) -> Iterator[Ask]:
    """Asks transformers, an item at a time."""
    from training.tiny_vl.oracle import Oracle

    oracle = Oracle(model, dtype)
    yield lambda item: oracle.answer(item, MAX_TOKENS)
