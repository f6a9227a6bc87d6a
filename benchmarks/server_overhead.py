"""What the server costs the engine: 8 answers streamed to clients, against the same 8 through the library.

    python benchmarks/server_overhead.py CHECKPOINT [--rounds 5] [--clients 8] [--tokens 128] [--json FILE]

Three ways take turns, each with a model of its own: the library alone; the server as it is, with the engine in another
process; the server with the engine's threads in its own process. The clients run in this process, and take a share of
the machine like the server does: "client CPU" says how much.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

from server_process import ServerProcess

from tilewright.bench.http_client import Client, ServerAddress
from tilewright.bench.serve import run
from tilewright.bench.serve.workload import Workload
from tilewright.process import run_loop

READY_TIMEOUT_S = 300.0
TIMEOUT_S = 300.0
PROMPT_TOKENS = 32
DISTURBING_BYTES = 20 << 20
DISTURBING_PAUSE_S = 0.2


def bodies(options, seed):
    """The requests of a round: short prompts that no cache knows."""
    lengths = (PROMPT_TOKENS, PROMPT_TOKENS), (options.tokens, options.tokens)
    workload = Workload("", prompt_tokens=lengths[0], output_tokens=lengths[1], seed=seed)
    return list(workload.requests(range(options.clients)))


class Library:
    """The library in a process that answers a line for each round."""

    def __init__(self, command):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline() == "ready\n"

    def run(self, seed):
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait()


class Streamed:
    """A server, and clients that read what it streams."""

    def __init__(self, name, command, options, folder):
        self._options = options
        self._server = ServerProcess(name, command, {}, Path(folder, f"{name}.log"))
        self._server.wait_until_ready(READY_TIMEOUT_S)

    def run(self, seed):
        requests = bodies(self._options, seed)
        client = Client(ServerAddress.parse(self._server.url))
        cpu_s, begin_s = process_time(), perf_counter()
        pace = run.ClosedLoop(len(requests))
        samples = run_loop(self._stream(client, requests, pace))
        seconds = perf_counter() - begin_s
        assert all(sample.failure is None for sample in samples), samples
        tokens = sum(sample.output_tokens for sample in samples)
        return {"tokens": tokens, "seconds": seconds, "client_cpu": (process_time() - cpu_s) / seconds}

    async def _stream(self, client, requests, pace):
        disturbing = asyncio.create_task(self._disturb()) if self._options.disturb else None
        try:
            return await run.run(client, "/v1/chat/completions", requests, pace, TIMEOUT_S)
        finally:
            if disturbing:
                disturbing.cancel()
            client.close()

    async def _disturb(self):
        """Large bodies one after the other, each refused once it is read: other people's pictures."""
        client = Client(ServerAddress.parse(self._server.url))
        body = json.dumps({"messages": [], "user": "x" * DISTURBING_BYTES}).encode()
        while True:
            async with client.request("POST", "/v1/chat/completions", body) as response:
                await response.read(1 << 16)
            assert response.status == 400, response.status
            await asyncio.sleep(DISTURBING_PAUSE_S)

    def close(self):
        self._server.__exit__()


def run_library(options):
    """Rounds as standard input asks for them."""
    from tilewright import Engine

    with Engine(options.checkpoint, max_sequences=64) as engine:
        print("ready", flush=True)
        for line in sys.stdin:
            asked = [json.loads(request.body) for request in bodies(options, int(line))]
            begin_s = perf_counter()
            handles = [
                engine.submit_chat(
                    body["messages"],
                    temperature=0,
                    max_tokens=options.tokens,
                    min_tokens=options.tokens,
                    ignore_eos=True,
                )
                for body in asked
            ]
            tokens = sum(len(handle.result()[0].token_ids) for handle in handles)
            print(json.dumps({"tokens": tokens, "seconds": perf_counter() - begin_s}), flush=True)


def run_thread_server(options):
    """The server's own application, in front of an engine in this process."""
    import uvicorn

    from tilewright import Engine
    from tilewright.server.api.handler import ApiHandler
    from tilewright.server.http.app import create_app
    from tilewright.server.http.settings import ServerSettings
    from tilewright.server.link.remote import LocalBackend

    async def serve(engine):
        app = create_app(ApiHandler(ServerSettings(), LocalBackend(engine)))
        listener = socket.create_server(("127.0.0.1", options.port))
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
        await uvicorn.Server(config).serve(sockets=[listener])

    with Engine(options.checkpoint, max_sequences=64) as engine:
        run_loop(serve(engine))


def compare(options):
    sizes = ["--clients", str(options.clients), "--tokens", str(options.tokens)]
    me = [sys.executable, __file__, options.checkpoint, *sizes]
    serve = [sys.executable, "-m", "tilewright", "serve", options.checkpoint, "--port", "{port}"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "library": Library([*me, "--role", "library"]),
            "process": Streamed("process", serve, options, folder),
            "thread": Streamed("thread", [*me, "--role", "thread", "--port", "{port}"], options, folder),
        }
        try:
            for way in ways.values():
                way.run(seed=0)  # warm
            for round_number in range(options.rounds):
                row = {name: way.run(seed=1 + round_number) for name, way in ways.items()}
                rows.append(row)
                speeds = {name: result["tokens"] / result["seconds"] for name, result in row.items()}
                print("  ".join(f"{name} {speed:.1f} tokens/s" for name, speed in speeds.items()), flush=True)
        finally:
            for way in ways.values():
                way.close()
    for name in ("process", "thread"):
        shares = [
            row[name]["tokens"] / row[name]["seconds"] / (row["library"]["tokens"] / row["library"]["seconds"])
            for row in rows
        ]
        cpu = statistics.median(row[name]["client_cpu"] for row in rows)
        spread = f"{min(shares):.3f}-{max(shares):.3f}"
        share = f"{statistics.median(shares):.3f} ({spread}) of the library"
        print(f"server with the engine in a {name}: {share}, client CPU {cpu:.2f}")
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "rounds": rows}, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--disturb", action="store_true", help="send refused bodies of 20 MB beside the streams")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--role", choices=("compare", "library", "thread"), default="compare", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    {"compare": compare, "library": run_library, "thread": run_thread_server}[options.role](options)


if __name__ == "__main__":
    main()
