"""How fast chat is while pictures are made beside it, for several ways to share the cores.

    python benchmarks/chat_beside_pictures.py IMAGE_MODEL [--model MODEL] [--size 256x256] [--rounds 5] [--seconds 6]

An engine and a picture worker per way, each in its process as `tilewright serve` starts them. Answers are generated one
after the other; beside them pictures are made all the time. Ways take turns in every round; medians are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import time
from pathlib import Path

from tilewright.diffusion.requests import LAST_EVENTS, PictureRequest, Stepped
from tilewright.server.http.settings import ServerSettings
from tilewright.server.link.backend import AnswerDelta, Ended, EngineRequest, Failed
from tilewright.server.link.pictures import PictureBackend
from tilewright.server.link.remote import RemoteBackend
from tilewright.weights import embedded

NUM_TOKENS = 64
NUM_STEPS = 8
HALF = max(1, len(os.sched_getaffinity(0)) // 2)
WAYS = {  # niceness and threads of the picture worker
    "same priority": (0, None),
    "niceness 10": (10, None),
    "niceness 19": (19, None),
    f"{HALF} of the threads": (0, HALF),
}


async def answer(engine: RemoteBackend) -> list[float]:
    """When the tokens of one answer came."""
    done, times = asyncio.get_running_loop().create_future(), []

    def see(event: object) -> None:
        if isinstance(event, AnswerDelta):
            times.append(time.perf_counter())
        elif isinstance(event, Ended | Failed):
            done.set_result(None)

    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0}
    engine.submit(EngineRequest(messages=[{"role": "user", "content": "What is it?"}], sampling=sampling), see)
    await done
    return times


async def draw(worker: PictureBackend, width: int, height: int, steps: list[float]) -> None:
    """Makes pictures until it is cancelled, and notes when steps ended."""
    while True:
        done = asyncio.get_running_loop().create_future()

        def see(event: object, done: asyncio.Future = done) -> None:
            if isinstance(event, Stepped):
                steps.append(time.perf_counter())
            elif isinstance(event, LAST_EVENTS):
                done.set_result(event)

        settings = {"width": width, "height": height, "num_steps": NUM_STEPS}
        cancel = worker.submit(PictureRequest("tiles", settings), see)
        try:
            await done
        finally:
            cancel()


async def measure(
    engine: RemoteBackend, worker: PictureBackend | None, size: tuple[int, int], seconds: float
) -> dict[str, float]:
    """Tokens and steps a second, and the longest of the gaps between tokens but for one in a hundred."""
    steps: list[float] = []
    drawing = None if worker is None else asyncio.create_task(draw(worker, *size, steps))
    while drawing is not None and len(steps) < 2:  # the model is loaded, the threads are there
        await asyncio.sleep(0.01)
    begin_s, num_before, num_tokens, gaps = time.perf_counter(), len(steps), 0, []
    while time.perf_counter() - begin_s < seconds:
        times = await answer(engine)
        num_tokens += len(times)
        gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
    took_s, num_steps = time.perf_counter() - begin_s, len(steps) - num_before
    if drawing is not None:
        drawing.cancel()
        await asyncio.gather(drawing, return_exceptions=True)
    gaps.sort()
    return {
        "tokens_per_s": num_tokens / took_s,
        "gap_p99_s": gaps[len(gaps) * 99 // 100],
        "steps_per_s": num_steps / took_s,
    }


async def run(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    limits = dataclasses.asdict(ServerSettings().media.limits)
    model = options.model or str(embedded.path())
    engine = RemoteBackend({"model": model, "kv_memory": "256MB", "isolate_media": True, "media_limits": limits})
    workers = {
        name: PictureBackend(name, {"model": options.image_model}, limits, niceness=niceness, num_threads=num_threads)
        for name, (niceness, num_threads) in WAYS.items()
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ("alone", *WAYS)}
    width, height = map(int, options.size.split("x"))
    try:
        await engine.start()
        await answer(engine)
        for _ in range(options.rounds):
            for name, results in found.items():
                results.append(await measure(engine, workers.get(name), (width, height), options.seconds))
    finally:
        with contextlib.suppress(Exception):
            for worker in workers.values():
                await worker.close()
        await engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image_model", metavar="IMAGE_MODEL")
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--size", default="256x256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    found = asyncio.run(run(options))
    medians = {
        name: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }
    alone = medians["alone"]["tokens_per_s"]
    print(f"{'':32} tokens/s  of alone  gap p99 ms  steps/s")
    for name, row in medians.items():
        speed, gap_ms = row["tokens_per_s"], 1000 * row["gap_p99_s"]
        print(f"{name:32} {speed:8.1f}  {speed / alone:8.0%}  {gap_ms:10.1f}  {row['steps_per_s']:7.2f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
