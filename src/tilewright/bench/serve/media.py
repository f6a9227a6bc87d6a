"""Pictures, videos and sounds made from a seed: no two alike; pictures are compressible as photographs are."""

from __future__ import annotations

import base64
import io
import math
import random
import struct
import wave
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

NUM_SHAPES = 24
JPEG_QUALITY = 85
# A frame rate that models sample at, Qwen's among them: all frames are used.
VIDEO_FPS = 2
SOUND_RATE = 16_000
SYLLABLES_PER_SECOND = 4


def draw(size: tuple[int, int], chance: random.Random) -> Image:
    """Smooth colours under ellipses and rectangles."""
    from PIL import Image, ImageDraw

    width, height = size
    picture = Image.frombytes("RGB", (4, 4), chance.randbytes(48)).resize(size, Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(picture)
    for _ in range(NUM_SHAPES):
        left, top = chance.randrange(width), chance.randrange(height)
        right, bottom = left + chance.randint(1, 1 + width // 4), top + chance.randint(1, 1 + height // 4)
        shape = chance.choice((pen.ellipse, pen.rectangle))
        shape((left, top, right, bottom), fill=tuple(chance.randbytes(3)))
    return picture


def picture_url(size: tuple[int, int], format: str, chance: random.Random) -> str:
    """A drawn picture as a data URL; `format` is jpeg or png."""
    file = io.BytesIO()
    draw(size, chance).save(file, format, quality=JPEG_QUALITY)
    return _data_url(f"image/{format}", file.getvalue())


def video_url(size: tuple[int, int], num_frames: int, chance: random.Random) -> str:
    """A drawn picture that moves to the left, as an MP4 in a data URL. Sides must be even."""
    import av
    from PIL import ImageChops

    picture = draw(size, chance)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        # FFmpeg's own encoder: there in every build of it, so that the same seed is the same work everywhere.
        stream = container.add_stream("mpeg4", rate=VIDEO_FPS)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for index in range(num_frames):
            shifted = ImageChops.offset(picture, -index * size[0] // num_frames, 0)
            container.mux(stream.encode(av.VideoFrame.from_image(shifted)))
        container.mux(stream.encode(None))
    return _data_url("video/mp4", file.getvalue())


def sound_base64(seconds: float, chance: random.Random) -> str:
    """Tones that rise and fall as syllables do, a WAV of 16 kHz, mono."""
    length = SOUND_RATE // SYLLABLES_PER_SECOND
    samples: list[int] = []
    while len(samples) < seconds * SOUND_RATE:
        pitch, formant = chance.uniform(90, 260), chance.uniform(400, 3000)
        for place in range(length):
            time_s, loudness = place / SOUND_RATE, 9000 * math.sin(math.pi * place / length)
            tones = math.sin(2 * math.pi * pitch * time_s) + 0.4 * math.sin(2 * math.pi * formant * time_s)
            samples.append(int(loudness * tones))
    count = round(seconds * SOUND_RATE)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, SOUND_RATE, count, "NONE", ""))
        writer.writeframes(struct.pack(f"<{count}h", *samples[:count]))
    return base64.b64encode(file.getvalue()).decode()


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
