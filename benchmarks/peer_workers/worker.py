"""One system under test, as a process that loads a checkpoint once and then obeys lines of JSON.

In:  {"call": "text", "count": 1, "prompt_tokens": 128, "new_tokens": 65, "seed": 7}
     {"call": "image", ..., "width": 448, "height": 448}: `prompt_tokens` are those beside each image, which
     `image_seed` may make another call's
     {"call": "probe"}: how fast the machine is, of a worker that can tell
Out: {"ready": {...}} once, then {"seconds": ..., ...}, or {"error": ...}, for every line; "first_token_s" of the first
     request, from a system that tells it.
The same seed makes the same prompts and images in every system. Making them is not timed; preprocessing them is.
Imported by the environments of all systems: needs numpy and Pillow, nothing else.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TextIO

import numpy as np
from PIL import Image


class Checkpoint:
    """What every system must know of a checkpoint to be asked the same."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.config = json.loads((Path(folder) / "config.json").read_text())
        self.has_vision = "vision_config" in self.config
        vocabulary_size = self.config.get("text_config", self.config)["vocab_size"]
        # Clear of special tokens, which are the first or the last of every vocabulary here.
        self.id_range = min(1000, vocabulary_size // 8), min(40_000, vocabulary_size * 7 // 8)

    def token_ids(self, count: int, seed: int) -> list[int]:
        return np.random.default_rng([seed, 1]).integers(*self.id_range, count).tolist()

    def around_image(self, num_placeholders: int, token_ids: list[int]) -> list[int]:
        """A prompt of an image and then text; one placeholder where tokens attend to images from outside."""
        if "vision_start_token_id" not in self.config:
            return [self.config["image_token_index"], *token_ids]
        start, image, end = (self.config[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end"))
        return [start, *[image] * num_placeholders, end, *token_ids]


def image(width: int, height: int, seed: int) -> Image.Image:
    """Soft waves, discs with edges, and noise: as hard to resize and as easy to tell apart as a photograph."""
    random = np.random.default_rng([seed, 2])
    y, x = np.mgrid[0:height, 0:width].astype(np.float32) / max(width, height)
    channels = [np.sin(random.uniform(2, 12) * x + random.uniform(2, 12) * y + phase) for phase in range(3)]
    pixels = 128 + 80 * np.stack(channels, axis=-1)
    for _ in range(10):
        center_x, center_y, radius = random.uniform(0, 1), random.uniform(0, 1), random.uniform(0.03, 0.15)
        pixels[(x - center_x) ** 2 + (y - center_y) ** 2 < radius**2] = random.integers(0, 256, 3)
    pixels += random.normal(0, 6, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


class System:
    """A system under test: loaded by its constructor. `generate` answers all requests of a call together, greedily,
    with exactly `new_tokens` tokens each, and returns how many tokens the first prompt had."""

    name = ""
    keeps_prefixes = False  # whether a call that comes again may be answered faster
    first_token_s: float | None = None  # of the last call, since it began, where the system tells it

    def versions(self) -> dict[str, str]:
        raise NotImplementedError

    def generate(self, prompts: list[list[int]], images: list[Image.Image] | None, new_tokens: int) -> int:
        raise NotImplementedError

    def details(self) -> dict[str, object]:
        """What else is worth knowing of it, once, when it is loaded."""
        return {}

    def probe(self) -> dict[str, float]:
        raise NotImplementedError(f"{self.name} has no probe")


def take_stdout() -> TextIO:
    """Standard output, kept for answers: what libraries print from now on goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def serve(make_system: Callable[[Checkpoint], System], folder: str, answers: TextIO) -> None:
    """Loads the system and answers until standard input ends."""
    begin = perf_counter()
    checkpoint = Checkpoint(folder)
    system = make_system(checkpoint)
    ready = {
        "name": system.name,
        "versions": system.versions(),
        "load_s": perf_counter() - begin,
        "has_vision": checkpoint.has_vision,
        "keeps_prefixes": system.keeps_prefixes,
        **system.details(),
    }
    print(json.dumps({"ready": ready}), file=answers)
    for line in sys.stdin:
        try:
            answer = _obey(system, checkpoint, json.loads(line))
        except Exception as error:  # the driver names it; the trace is in the log
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


def _obey(system: System, checkpoint: Checkpoint, command: dict) -> dict[str, object]:
    if command["call"] == "probe":
        return system.probe()
    count, num_tokens, seed = command["count"], command["prompt_tokens"], command["seed"]
    prompts = [checkpoint.token_ids(num_tokens, 100 * seed + i) for i in range(count)]
    images = None
    if command["call"] == "image":
        image_seed = command.get("image_seed", seed)
        images = [image(command["width"], command["height"], 100 * image_seed + i) for i in range(count)]
    begin = perf_counter()
    num_prompt_tokens = system.generate(prompts, images, command["new_tokens"])
    answer = {"seconds": perf_counter() - begin, "prompt_tokens": num_prompt_tokens}
    return answer if system.first_token_s is None else {**answer, "first_token_s": system.first_token_s}
