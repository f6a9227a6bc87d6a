"""A server of serve_peers.py: started, waited for, and ended with all its processes."""

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep

NUM_LOG_LINES = 25
POLL_S = 0.25


class ServerError(RuntimeError):
    """A server that did not start, died or did not do what it was asked; says its name and its last words."""


class ServerProcess:
    """A server on a free port of loopback, apart from our own processes; `with` ends it."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """In `command`, {port} stands for the port."""
        self.name = name
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [part.replace("{port}", str(self.port)) for part in command]
        self._began_s = monotonic()
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **environment},
                    start_new_session=True,  # Ctrl-C comes to the driver, which ends the server in order
                )
        except OSError as error:
            raise ServerError(f"{name} cannot be started as {command[0]}: {error.strerror}") from error

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_until_ready(self, timeout_s: float) -> float:
        """Seconds from its start until GET /health was answered with 200."""
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise self.failure(f"ended with status {self._process.returncode} before it was ready")
            if monotonic() - self._began_s > timeout_s:
                raise self.failure(f"was not ready after {timeout_s:.0f} s")
            sleep(POLL_S)
        return monotonic() - self._began_s

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def resident_bytes(self) -> int:
        """Memory of all its processes; pages that several of them have are counted once."""
        total = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                first = (folder / "stat").read_text().rpartition(")")[2].split()[3]  # of those started with it
                if int(first) == self._process.pid:
                    found = re.search(r"^Pss:\s+(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)
                    total += int(found[1]) * 1024 if found else 0
        return total

    def failure(self, what: str) -> ServerError:
        lines = self.log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
        return ServerError(f"{self.name} {what}; the end of its output:" + "".join(f"\n  {line}" for line in lines))

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *error: object) -> None:
        """Asks it to end, and after a while makes it; what it started ends with it."""
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
