"""What stands in for a Diffusion: images that depend on prompt and seed alone, and steps that wait for a test's sign.

The worker's process opens it by `ENTRY`; it imports no torch, so that the process starts at once.
"""

import contextlib
import os
import signal
import time
import zlib
from types import SimpleNamespace

import numpy as np

from tilewright.diffusion.expected import Expected
from tilewright.diffusion.params import DiffusionLostError, Limits, PipelineTimings
from tilewright.server.http.settings import ServerSettings
from tilewright.server.link.diffusion import DiffusionBackend
from tilewright.types import RequestError

ENTRY = "fake_diffusion:FakeDiffusion"
NAME = "fake-draw"
LIMITS = Limits(
    size_multiple=16,
    default_width=64,
    default_height=48,
    default_steps=4,
    default_guidance=0.0,
    max_pixels=1 << 18,
    max_side=1024,
    max_steps=50,
    max_images=4,
    max_prompt_tokens=16,
)


class FakeDiffusion:
    """Prompts "crash", "lost", "fail", "no memory" and "too long" do what they say, at the second step."""

    name = NAME

    def __init__(self, gate=None, ballast_bytes=0, max_frames=1, takes_image=False, refuses=None, fps=16.0):
        """`gate` is a named pipe: a step begins with a byte of it. `ballast_bytes` are what each run holds."""
        if refuses:
            raise RequestError(refuses)
        fields = {**vars(LIMITS), "max_frames": max_frames, "takes_image": takes_image, "fps": fps}
        self.limits = Limits(**{**fields, "default_frames": max_frames, "frame_multiple": 4})
        self._gate = None if gate is None else os.open(gate, os.O_RDWR)
        self._ballast_bytes = ballast_bytes

    def expected(self, params):
        pixels = params.width * params.height / (LIMITS.default_width * LIMITS.default_height)
        return Expected(0.5 * params.num_steps * pixels, "as FakeDiffusion says")

    def run(self, params, on_step=None):
        ballast = np.ones(self._ballast_bytes, dtype=np.uint8)
        for step in range(1, params.num_steps + 1):
            if self._gate is not None:
                os.read(self._gate, 1)
            if step == 2 or params.num_steps == 1:
                self._misbehave(params.prompt)
            on_step(step, params.num_steps, step)
        del ballast
        images = [self._pixels(params, seed) for seed in params.seeds]
        timings = PipelineTimings(load_s=0.0, encode_s=0.01, denoise_s=0.4, decode_s=0.02, steps_s=[0.1] * 3)
        return SimpleNamespace(
            images=images, timings=timings, settings_of=lambda index: {"model": NAME, **params.settings(index)}
        )

    def preview(self, latents, params):
        return np.stack([np.full_like(self._pixels(params, seed), latents) for seed in params.seeds])

    def _misbehave(self, prompt):
        if prompt == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt == "fail":
            raise RuntimeError("a secret of the inside")
        if prompt == "lost":
            raise DiffusionLostError("rank 1 died of SIGKILL")
        if prompt == "no memory":
            raise MemoryError
        if prompt == "too long":
            raise RequestError("prompt has 900 tokens, expected at most 16", param="prompt")

    def _pixels(self, params, seed):
        colour = zlib.crc32(f"{params.prompt} {seed}".encode()).to_bytes(4, "big")[:3]
        pixels = np.empty((params.num_frames, params.height, params.width, 3), dtype=np.uint8)
        pixels[:] = np.frombuffer(colour, dtype=np.uint8)
        if params.image is not None:
            pixels[:] = np.asarray(params.image).reshape(-1, 3)[0]
        return pixels


class Gate:
    """Lets steps of a FakeDiffusion begin."""

    def __init__(self, folder):
        self.path = str(folder / "gate")
        os.mkfifo(self.path)
        self._fd = os.open(self.path, os.O_RDWR)

    def open(self, num_steps=1):
        os.write(self._fd, b"." * num_steps)

    def open_until(self, holds):
        """Lets steps begin until `holds()`: a cancelled run ends with one of the next, when the worker knows of it."""
        for _ in range(600):
            self.open()
            time.sleep(0.1)
            if holds():
                return
        raise AssertionError("it does not hold")

    def close(self):
        with contextlib.suppress(OSError):
            os.close(self._fd)


def fake_backend(gate=None, *, max_queue=16, **options):
    """A DiffusionBackend whose process makes fake images."""
    from dataclasses import asdict

    model = {**options, **({} if gate is None else {"gate": gate.path})}
    return DiffusionBackend(NAME, model, asdict(ServerSettings().media.limits), max_queue=max_queue, entry=ENTRY)
