"""Requests of every kind for a while, from many clients at once, while processes of the server are killed and stopped.

    python tests/server/soak_kills.py --minutes 30 --clients 32
    python tests/server/soak_kills.py --minutes 3 --every 15
    python tests/server/soak_kills.py --minutes 5 --every 0            without kills

starts two servers of the embedded models: one answers about images and draws, the other hears and speaks. Answers
must be those that the same requests got alone. Only what a kill or a stop of its own process cut may fail, with a 503
or an error event that says so, and must succeed when it is sent again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import soak
import soak_images
from processes import family_of, memory_bytes
from soak_beside import Misbehaviour

from tilewright.bench.http_client import Client, HttpError, ServerAddress
from tilewright.inputs.isolation import main as decoder
from tilewright.server.link import diffusion_process, service
from tilewright.weights import embedded

PROCESSES = {  # what of its command tells each
    "engine": service.__name__,
    "media decoder": decoder.__name__,
    "constraint sandbox": "engine.constraint.sandbox",
    "diffusion worker": diffusion_process.__name__,
}
CUTS = {"engine", "diffusion worker"}  # whose end may cut requests; others are replaced within the request
STOPPED_S = 3.0
GRACE_S = 1.0  # after a process is back, for what waited
LOST_AFTER_S = 180.0
# Threads of a server's executor, files and maps of media decoders: pools that fill when many requests come at once.
POOLS = 10
NUM_SLOW_READERS, NUM_HALF_SENT = 4, 8
MEMORY = {"memory": "resident memory of all processes", "of the server": "of the HTTP servers alone"}
SPEECH = "/v1/audio/speech"
TOOLS = [{"type": "function", "function": {"name": "lay", "parameters": soak.SCHEMA}}]
# Hermes' form, which the server then has the model follow.
TOOL_TEMPLATE = """{%- if tools -%}
  {{- '<tools>' + tools | tojson + '</tools>' }}
  {{- '<tool_call>{"name": "...", "arguments": {}}</tool_call>' -}}
{%- endif -%}
"""


def of_images(kind):
    def make(rng):
        path, body, status = soak_images.KINDS[kind](rng)
        leaves = rng.randrange(1, 200) if status is None else 0
        return soak.Request(f"drawing: {kind}", path, json.dumps(body).encode(), status, leaves)

    return make


def spoken(rng):
    body = {"input": soak.text_of(rng), "response_format": "pcm", "temperature": 0, "seed": 3}
    return soak.Request("spoken", SPEECH, json.dumps(body).encode())


def with_tools(rng):
    return soak.Request(
        "tools", soak.CHAT, soak.chat(rng, tools=TOOLS, tool_choice="required", max_tokens=60, temperature=0)
    )


HEARD = ("sound", "sound and image", "no sound")
LOOKS = {
    **{kind: make for kind, make in soak.KINDS.items() if kind not in HEARD},
    **{kind: of_images(kind) for kind in soak_images.KINDS if not kind.startswith("chat")},
    "tools": with_tools,
}
LISTENS = {
    **{kind: soak.KINDS[kind] for kind in ("text", "stream", "sound", "no sound", "left in mid-stream", "malformed")},
    "spoken": spoken,
}
_fresh = itertools.count()


def fresh_pattern(rng):
    """A constraint that was never compiled before, and so comes to the sandbox."""
    pattern = f"(ab|cd|x{next(_fresh)}){{2,4}}"
    body = soak.chat(rng, structured_outputs={"regex": pattern}, max_tokens=60)
    return soak.Request("fresh pattern", soak.CHAT, body), pattern


@dataclass
class Outages:
    """When processes whose end cuts requests were away."""

    spans: list[list[float]] = field(default_factory=list)

    @contextlib.contextmanager
    def under_way(self):
        span = [time.monotonic(), float("inf")]
        self.spans.append(span)
        try:
            yield
        finally:
            span[1] = time.monotonic() + GRACE_S

    def touch(self, began_s, ended_s):
        return any(began_s <= until_s and ended_s >= since_s for since_s, until_s in self.spans)


@dataclass
class Found:
    """What came of everything."""

    statuses: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_cut: Counter = field(default_factory=Counter)  # by what the error says
    num_full: int = 0  # times that a queue was full
    worst_gap_s: float = 0.0  # of chat streams, outside of outages
    worst_gap_within_s: float = 0.0
    num_gaps_over_1_s: int = 0
    worst_health_s: float = 0.0
    strikes: list[tuple[str, str, float]] = field(default_factory=list)  # what, how, seconds until it was replaced
    peak_bytes: int = 0
    loads: list[float] = field(default_factory=list)
    grown: Counter = field(default_factory=Counter)  # what is held that was not held before


class Site:
    """One server, what it is asked, and what that gave alone."""

    def __init__(self, name, server, kinds, num_clients, found):
        self.name, self.server, self.num_clients, self.found = name, server, num_clients, found
        self.client = Client(ServerAddress.parse(server.url))
        self.outages, self.answers = Outages(), {}
        count = 6 * len(kinds)
        of_kind = list(kinds.values())
        self.requests = [of_kind[i % len(kinds)](random.Random(f"{name} {i}")) for i in range(count)]

    def pids(self, what):
        found = []
        for pid in family_of(self.server.process.pid):
            with contextlib.suppress(OSError):
                if PROCESSES[what].encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    async def learn(self):
        """Each request alone, once: what it gives is what it must give."""
        for request in self.requests:
            await self.ask(request)

    async def warm_up(self):
        """All requests from all clients twice: what grows up to its size has grown."""
        waiting = iter(2 * self.requests)

        async def work():
            for request in waiting:
                await self.ask(request)

        await asyncio.gather(self.ask(*fresh_pattern(random.Random(0))), *(work() for _ in range(self.num_clients)))

    async def work(self, index, until_s):
        rng = random.Random(f"{self.name} {index}")
        while time.monotonic() < until_s:
            await (self.ask(*fresh_pattern(rng)) if rng.random() < 0.05 else self.ask(rng.choice(self.requests)))

    async def ask(self, request, pattern=None):
        """Sends a request until it is answered, or was wrong."""
        first_s = time.monotonic()
        while True:
            began_s = time.monotonic()
            try:
                status, body, gaps = await asyncio.wait_for(self.send(request), LOST_AFTER_S)
            except (HttpError, OSError, asyncio.TimeoutError) as error:
                self.wrong(request, f"{type(error).__name__}: {error}")
                return
            self.see_gaps(request, gaps)
            error = error_of(status, body) if request.status is not None else None
            if status == 429:  # a queue is full: again later, as a client does
                self.found.num_full += 1
                await asyncio.sleep(0.2)
                continue
            if error is not None and error.get("code") == "engine_unavailable":
                if not self.outages.touch(began_s, time.monotonic()):
                    self.wrong(request, f"cut while nothing was killed: {error['message']}")
                if time.monotonic() - first_s > LOST_AFTER_S:
                    self.wrong(request, f"not answered for {LOST_AFTER_S:.0f} s: {error['message']}")
                    return
                self.found.num_cut[re.sub(r"\d+", "N", error["message"])] += 1
                await asyncio.sleep(1.0)
                continue
            self.found.statuses[request.kind, status] += 1
            if status != request.status or (status == 200 and error is not None):
                self.wrong(request, f"{status}, expected {request.status}: {error or body[:300]!r}")
            elif status == 200:
                await self.check(request, body, pattern)
            return

    async def check(self, request, body, pattern):
        answer = await self.answer_of(request, body)
        if pattern is not None:
            text, reason = answer[0][0]["content"], answer[0][1]
            if reason == "stop" and not re.fullmatch(pattern, text):
                self.wrong(request, f"{text!r} does not match {pattern}")
        elif self.answers.setdefault(request.body, answer) != answer:
            self.wrong(request, f"{str(answer)[:300]}, alone {str(self.answers[request.body])[:300]}")

    async def answer_of(self, request, body):
        """What an answer says, without what differs each time."""
        if request.path == SPEECH:
            return hashlib.sha256(body).hexdigest()
        if request.path != soak_images.IMAGES:
            body = re.sub(rb'"id": ?"call_\w+"', b'"id": ""', body)
            return soak.said(body.replace(b": reading\n\n", b""))
        if body.startswith((b"event:", b":")):
            events = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: ")]
            whole = [event["b64_json"] for event in events if event["type"].endswith("completed")]
            return [hashlib.sha256(one.encode()).hexdigest() for one in whole]
        images = []
        for item in json.loads(body)["data"]:
            data = item.get("b64_json", "").encode()
            if "url" in item:
                async with self.client.request("GET", "/" + item["url"].split("/", 3)[3]) as response:
                    data = await response.read(soak_images.MAX_BYTES)
            images.append(hashlib.sha256(data).hexdigest())
        return images

    async def send(self, request):
        """(status, body, when its pieces came); the status is None where the client left."""
        if request.leaves_after_bytes:
            return *await soak.send(self.client, request), []
        times_s, pieces = [], []
        async with self.client.request("POST", request.path, request.body) as response:
            async for piece in response.pieces():
                times_s.append(time.monotonic())
                pieces.append(piece)
            return response.status, b"".join(pieces), times_s

    def see_gaps(self, request, times_s):
        if request.kind != "stream":
            return
        for before_s, after_s in itertools.pairwise(times_s):
            gap_s = after_s - before_s
            if self.outages.touch(before_s, after_s):
                self.found.worst_gap_within_s = max(self.found.worst_gap_within_s, gap_s)
            else:
                self.found.worst_gap_s = max(self.found.worst_gap_s, gap_s)
                self.found.num_gaps_over_1_s += gap_s > 1

    def wrong(self, request, what):
        self.found.wrong.append(f"{self.name}, {request.kind}: {what}")

    async def health(self):
        """(status, seconds)."""
        began_s = time.monotonic()
        async with self.client.request("GET", "/health") as response:
            await response.read(1 << 16)
            return response.status, time.monotonic() - began_s

    async def watch(self):
        """Asks /health all the time: it answers at once, and tells of an outage."""
        while True:
            began_s = time.monotonic()
            status, took_s = await self.health()
            self.found.worst_health_s = max(self.found.worst_health_s, took_s)
            if status != 200 and not self.outages.touch(began_s, time.monotonic()):
                self.found.wrong.append(f"{self.name}: /health is {status} while nothing was killed")
            await asyncio.sleep(0.25)

    async def strike(self, what, number):
        """Kills or stops one process of a kind; returns when there is another, or it goes on."""
        while not (pids := self.pids(what)):
            await asyncio.sleep(0.1)
        pid, began_s = random.choice(pids), time.monotonic()
        outage = self.outages.under_way() if what in CUTS else contextlib.nullcontext()
        with outage, contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            if number == signal.SIGSTOP:
                await asyncio.sleep(STOPPED_S)
                os.kill(pid, signal.SIGCONT)
            while what in CUTS and not await self.is_back(what, pid if number == signal.SIGKILL else None):
                await asyncio.sleep(0.02)
        self.found.strikes.append((f"{what} ({self.name})", number.name, time.monotonic() - began_s))

    async def is_back(self, what, lost_pid):
        if lost_pid in (pids := self.pids(what)) or not pids:
            return False
        if what == "engine":
            return (await self.health())[0] == 200
        async with self.client.request("GET", "/metrics") as response:
            return b"tilewright_picture_worker_ready 1.0" in await response.read(1 << 20)

    async def held(self):
        """What the server holds when nothing is asked of it."""
        return await asyncio.to_thread(self._held)

    def _held(self):
        deadline_s = time.monotonic() + 60
        while busy := [name for name in soak_images.IN_USE[:-1] if self.server.metrics().get(f"tilewright_{name}")]:
            assert time.monotonic() < deadline_s, f"{self.name}: still in use: {busy}"
            time.sleep(0.1)
        time.sleep(6)  # connections that wait for another request are closed after 5 s
        pid = self.server.process.pid
        self.details = Counter(entry for one in family_of(pid) for entry in self.details_of(one))
        return {**soak_images.left_behind(pid), "of the server": memory_bytes(pid)}

    def details_of(self, pid):
        """What a process holds, by its kind: to tell what has grown."""
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            kind = next((what for what, part in PROCESSES.items() if part in command), "server")
            yield f"{self.name}: {kind}"
            yield from (f"{kind}: a thread" for _ in os.listdir(f"/proc/{pid}/task"))
            for file in os.listdir(f"/proc/{pid}/fd"):
                yield f"{kind}: {re.sub(r'[0-9]+', 'N', os.readlink(f'/proc/{pid}/fd/{file}'))}"


def error_of(status, body):
    """The error that a response or a stream ends with, if any."""
    if status != 200:
        with contextlib.suppress(ValueError):
            return json.loads(body)["error"]
        return {"message": repr(body[:200])}
    for line in body.split(b"\n"):
        if line.startswith(b"data: {") and b'"error"' in line:
            document = json.loads(line[6:])
            if isinstance(document.get("error"), dict):
                return document["error"]
    return None


async def keep_striking(sites, every_s, until_s):
    """One process after the other, in turns of kinds."""
    targets = [(site, what) for site in sites for what in PROCESSES if site is sites[0] or what != "diffusion worker"]
    turns = itertools.cycle([(*target, number) for number in (signal.SIGKILL, signal.SIGSTOP) for target in targets])
    next_s = time.monotonic() + every_s / 2
    while next_s + 15 < until_s:  # what is struck last must be back before the end
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        site, what, number = next(turns)
        await site.strike(what, number)
        next_s += every_s


async def sample(sites, found):
    while True:
        pids = [pid for site in sites for pid in family_of(site.server.process.pid)]
        found.peak_bytes = max(found.peak_bytes, sum(map(memory_bytes, pids)))
        found.loads.append(os.getloadavg()[0])
        await asyncio.sleep(1)


async def attack(sites, found, minutes, every_s):
    until_s = time.monotonic() + 60 * minutes
    beside = [asyncio.ensure_future(one) for one in (sample(sites, found), *(site.watch() for site in sites))]
    striking = asyncio.ensure_future(keep_striking(sites, every_s, until_s) if every_s else asyncio.sleep(0))
    await asyncio.gather(*(site.work(index, until_s) for site in sites for index in range(site.num_clients)))
    await striking
    for task in beside:
        if task.done():
            task.result()  # it should not have ended
        task.cancel()


def with_tool_template(folder):
    """The embedded model with a template that has a form for tools."""
    shutil.copytree(embedded.path(), folder)
    template = folder / "chat_template.jinja"
    template.write_text(TOOL_TEMPLATE + template.read_text())
    return folder


def start(folder, num_clients, found):
    from serve_process import ServerProcess

    flags = ("--max-body", "200KB", "--max-sequences", "16", "--max-context", "2000")
    looks = ServerProcess(
        with_tool_template(folder / "tilewright-tiny-vl"), *flags, "--image-model", embedded.DRAWING_NAME, ready_s=300
    )
    sites = [Site("looks", looks, LOOKS, num_clients - num_clients // 4, found)]
    try:
        listens = ServerProcess(embedded.OMNI_NAME, *flags, ready_s=300)
    except BaseException:
        looks.end()
        raise
    return [*sites, Site("listens", listens, LISTENS, num_clients // 4, found)]


def unexpected(lines):
    """Errors in the log that no kill explains."""
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    known = re.compile(r"the (engine|diffusion worker) ended \(signal SIGKILL\)")
    return [line for line in logged if line["level"] in ("error", "critical") and not known.match(line["message"])]


def report(found, before, after, minutes, took_to_end_s):
    """Prints the figures, as the table of docs/server.md, and what they are made of."""
    num = Counter(how for _, how, _ in found.strikes)
    rows = [
        (f"requests in {minutes:g} minutes", f"{found.statuses.total():,}"),
        ("wrong or lost", len(found.wrong)),
        ("cut or refused with 503 while a process was away, then answered", found.num_cut.total()),
        (f"processes killed; stopped for {STOPPED_S:g} s", f"{num['SIGKILL']}; {num['SIGSTOP']}"),
        ("worst gap in a stream while all processes ran", f"{found.worst_gap_s:.2f} s"),
        ("gaps over 1 s then", found.num_gaps_over_1_s),
        ("worst gap in a stream beside a kill or stop", f"{found.worst_gap_within_s:.2f} s"),
        ("slowest answer of `/health`", f"{found.worst_health_s:.2f} s"),
    ]  # fmt: skip
    for what in sorted({what for what, how, _ in found.strikes if how == "SIGKILL" and what.split(" (")[0] in CUTS}):
        seconds = [took_s for one, how, took_s in found.strikes if (one, how) == (what, "SIGKILL")]
        rows.append((f"{what}: from a kill to the next one ready", f"{min(seconds):.1f} to {max(seconds):.1f} s"))
    for name, label in MEMORY.items():
        low, high = before[name], after[name]
        rows.append((f"{label}, before and after", f"{low >> 20}, {high >> 20} MiB ({high / low - 1:+.1%})"))
    rows.append(("resident memory of all processes, at most", f"{found.peak_bytes >> 20} MiB"))
    rows += [(f"{name}, before and after", f"{before[name]}, {after[name]}") for name in before if name not in MEMORY]
    load = f"{sum(found.loads) / len(found.loads):.1f}; {max(found.loads):.1f}"
    rows.append((f"load of the machine, {os.cpu_count()} CPUs: mean; highest", load))
    rows.append(("seconds from SIGTERM to the end of the servers", f"{took_to_end_s:.1f}"))
    print("| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows), sep="\n")
    for kind, status in sorted(found.statuses, key=str):
        print(f"{kind}, {status or 'left'}: {found.statuses[kind, status]}")
    print("cut:", *(f"{count} x {message}" for message, count in found.num_cut.items()), sep="\n  ")
    print("queue full:", found.num_full)
    print("held that was not before:", *(f"{count} x {what}" for what, count in found.grown.items()), sep="\n  ")
    print("wrong:", *found.wrong[:20], sep="\n  ")


async def soak_all(sites, found, minutes, every_s):
    """(before, after): what all servers together hold."""

    async def totals():
        each = [await site.held() for site in sites]
        return {name: sum(one[name] for one in each) for name in each[0]}

    for site in sites:
        await site.learn()
        await site.warm_up()
    before = await totals()
    details = sum((site.details for site in sites), Counter())
    found.statuses.clear()
    with Misbehaviour(sites[0].server.url, 0, NUM_HALF_SENT, NUM_SLOW_READERS).under_way():
        await attack(sites, found, minutes, every_s)
    for site in sites:
        await site.warm_up()  # engines that took the place of others too
    after = await totals()
    found.grown = sum((site.details for site in sites), Counter()) - details
    return before, after


def run(options, folder):
    found = Found()
    sites = start(folder, options.clients, found)
    pids = []
    try:
        before, after = asyncio.run(soak_all(sites, found, options.minutes, options.every))
        pids = [pid for site in sites for pid in family_of(site.server.process.pid)]
    finally:
        began_s = time.monotonic()
        for site in sites:
            site.server.end()
        took_s = time.monotonic() - began_s
    for site in sites:
        status = site.server.process.returncode
        found.wrong += [f"{site.name}: it ended with {status}"] if status else []
        found.wrong += [f"{site.name}, log: {line}" for line in unexpected(site.server.lines)]
    found.wrong += [f"process {pid} is left" for pid in pids if os.path.exists(f"/proc/{pid}")]
    report(found, before, after, options.minutes, took_s)
    limits = {name: 1.05 * held if name in MEMORY else held + POOLS for name, held in before.items()}
    grew = [name for name, limit in limits.items() if after[name] > limit]
    print("grew:", *grew or ["nothing"])
    return bool(found.wrong or grew)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--every", type=float, default=120, help="seconds between two kills or stops; 0: none")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # the servers are ended then too
    with tempfile.TemporaryDirectory() as folder:
        return int(run(options, Path(folder)))


if __name__ == "__main__":
    raise SystemExit(main())
