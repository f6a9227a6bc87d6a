"""`tilewright serve` as users start it, in a process of its own."""

import json
import os
import resource
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import openai


class ServerProcess:
    """`tilewright serve` in a process of its own, on any free port; without a model, with the embedded one."""

    def __init__(
        self,
        model,
        *flags,
        api_key=None,
        max_file_bytes=resource.RLIM_INFINITY,
        ready_s=60,
        program=("-m", "tilewright"),
        **environment,
    ):
        self.api_key = api_key
        named = [] if model is None else [str(model)]
        flags = (*flags, *(() if api_key is None else ("--api-key", api_key)))
        command = [sys.executable, *program, "serve", *named, "--port", "0", "--kv-memory", "64MB"]
        self.process = subprocess.Popen(
            [*command, "--log-format", "json", *flags],
            stderr=subprocess.PIPE,
            text=True,
            # Writing past it fails as on a full disk.
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes)),
            env={**os.environ, "TILEWRIGHT_NUM_THREADS": "1", "TILEWRIGHT_CACHE_DIR": "off", **environment},
        )
        self.lines = []
        self.url = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.wait_for(lambda: self.url, ready_s)
        except BaseException:
            self.end()
            raise

    def _read(self):
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line)
                if "answers at" in line:
                    self.url = json.loads(line)["message"].split()[-1].removesuffix("/v1")
                self._changed.notify_all()
        self.process.wait()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, is_true, timeout_s=60):
        with self._changed:
            assert self._changed.wait_for(lambda: is_true() or self.process.poll() is not None, timeout_s)
        assert is_true(), "".join(self.lines)

    def client(self):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.api_key or "none", max_retries=0, timeout=60)

    def status(self, path="/health"):
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code

    def metrics(self):
        """The values of /metrics by name and labels."""
        request = urllib.request.Request(f"{self.url}/metrics", headers={"Authorization": f"Bearer {self.api_key}"})
        with urllib.request.urlopen(request, timeout=30) as response:
            lines = response.read().decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def metric(self, name):
        return self.metrics()[name]

    def wait_until_ready(self, timeout_s=60):
        """Until a new engine is there the server says so itself: 503, and nothing else."""
        deadline_s = time.monotonic() + timeout_s
        while (status := self.status()) != 200:
            assert status == 503 and time.monotonic() < deadline_s
            time.sleep(0.05)

    def engine_pid(self):
        """Of the one child that is the engine."""
        (pid,) = _children(self.process.pid, "link.service")
        return pid

    def rank_pids(self):
        """Of the engine's other ranks."""
        return _children(self.engine_pid(), "ranks.worker")

    def end(self):
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
        self._reader.join(10)


def _children(parent, name):
    """The processes that `parent` has started with `name` in their command."""
    command = ["ps", "-o", "pid=,args=", "--ppid", str(parent)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if name in line]
