"""A worker of peers.py, seen from the driver: one line of JSON out, one line back."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic

# With these set, threads of a worker that waits for its turn could spin beside the one that works.
SPINNING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
NUM_LOG_LINES = 15


class WorkerError(RuntimeError):
    """A worker that died, took too long or could not do what it was asked; says its name and its last words."""


class Worker:
    """A process that loads a model once, then works when it is told to and sleeps meanwhile."""

    def __init__(self, name: str, command: Sequence[str], log: Path, timeout_s: float) -> None:
        self.name = name
        self.log = log
        self.timeout_s = timeout_s
        self.details: Mapping[str, object] = {}
        environment = {key: value for key, value in os.environ.items() if key not in SPINNING}
        environment["HF_HUB_OFFLINE"] = "1"
        try:
            with log.open("wb") as errors:
                # A group of its own: Ctrl-C comes to the driver, which ends them in order.
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise WorkerError(f"{name} cannot be started as {command[0]}: {error.strerror}") from error
        self._unread = b""

    def wait_until_ready(self) -> None:
        answer = self._receive("load the checkpoint")
        if "ready" not in answer:
            raise WorkerError(f"{self.name} said {answer}, expected that it is ready")
        self.details = answer["ready"]

    def call(self, **command: object) -> dict:
        """The worker's answer to one command."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failure("has died") from None
        answer = self._receive(json.dumps(command))
        if "error" in answer:
            raise self._failure(f"could not do {json.dumps(command)}: {answer['error']}")
        return answer

    def cpu_seconds(self) -> float:
        """Processor time of all its threads until now."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """The memory it has resident now, files it mapped included."""
        try:
            found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self._process.pid}/status").read_text())
        except OSError:
            return 0
        return int(found[1]) * 1024 if found else 0

    def close(self, *, at_once: bool = False) -> None:
        """Ends it: by the end of its input, or, if that does not do or `at_once`, by force."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        for sign, patience_s in ((None, 0 if at_once else 15), (signal.SIGTERM, 10), (signal.SIGKILL, 10)):
            if sign is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
                return

    def _receive(self, task: str) -> dict:
        assert self._process.stdout is not None
        deadline = monotonic() + self.timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - monotonic()))
            if not ready:
                raise self._failure(f"took more than {self.timeout_s:.0f} s to {task}")
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise self._failure("has died")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _failure(self, what: str) -> WorkerError:
        status = ""
        if what == "has died":
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = f" with status {self._process.wait(5)}"
        lines = self.log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
        words = "".join(f"\n  {line}" for line in lines)
        return WorkerError(f"{self.name} {what}{status}; the end of its standard error:{words or ' nothing'}")
