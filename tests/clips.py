"""Small videos, made for the tests, and ways to damage files."""

import random
import struct
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def moving_picture(index: int, height: int = 48, width: int = 64) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([(x * 4 + index * 5) % 256, (y * 5 + index * 3) % 256, x * 0 + index * 2 % 256], axis=-1).astype(
        "u1"
    )


def write_clip(
    path: Path, num_frames: int, *, codec: str = "mpeg4", fps: int = 25, times_ms: list[int] | None = None,
    options: dict | None = None, container_options: dict | None = None,
) -> bytes:  # fmt: skip
    """Writes a clip and returns its bytes; `times_ms` gives each frame its own time."""
    with av.open(str(path), "w", options=container_options or {}) as container:
        stream = container.add_stream(codec, rate=fps, options=options or {})
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        if times_ms is not None:
            stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for index in range(num_frames):
            frame = av.VideoFrame.from_ndarray(moving_picture(index), format="rgb24")
            if times_ms is not None:
                frame.pts, frame.time_base = times_ms[index], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path.read_bytes()


def write_talking_clip(path: Path, num_frames: int, samples: np.ndarray, rate: int, fps: int = 25) -> bytes:
    """A clip with a sound of mono floats, and its bytes."""
    with av.open(str(path), "w") as container:
        pictures = container.add_stream("mpeg4", rate=fps)
        pictures.height, pictures.width, pictures.pix_fmt = 48, 64, "yuv420p"
        sound = container.add_stream("aac", rate=rate, layout="mono")
        for index in range(num_frames):
            container.mux(pictures.encode(av.VideoFrame.from_ndarray(moving_picture(index), format="rgb24")))
        container.mux(pictures.encode(None))
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[None], dtype=np.float32), "fltp", "mono")
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        container.mux(sound.encode(frame))
        container.mux(sound.encode(None))
    return path.read_bytes()


def rotated(data: bytes, degrees_clockwise: int) -> bytes:
    """An MP4 with the turn written into its track header, as phones do."""
    one = 1 << 16
    turns = {90: (0, one, -one, 0), 180: (-one, 0, 0, -one), 270: (0, -one, one, 0)}
    a, b, c, d = turns[degrees_clockwise]
    start = data.index(b"tkhd") + 44
    return data[:start] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[start + 36 :]


def all_frames(data_path: Path) -> np.ndarray:
    """Every frame of a file, decoded from the first to the last."""
    with av.open(str(data_path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def damages(data: bytes, count: int) -> Iterator[bytes]:
    """The data with bytes changed, lost and put in, the same ones every time; half of the places near the header."""
    generator = random.Random(0)
    for _ in range(count):
        damaged = bytearray(data)
        for _ in range(generator.randint(1, 6)):
            at = generator.randrange(len(damaged) if generator.random() < 0.5 else min(len(damaged), 400))
            end = at + generator.choice([0, 1, 4, 20])
            damaged[at:end] = generator.randbytes(generator.choice([0, 1, 4]))
        yield bytes(damaged)


def bitmap_header(side):
    """A BMP of side x side pixels, without the pixels."""
    head = b"BM" + struct.pack("<IHHI", 54, 0, 0, 54)
    return head + struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)
