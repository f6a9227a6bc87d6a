"""Makes the requests of a run from a seed, the same for every server; all images, videos and sounds differ."""

from __future__ import annotations

import base64
import io
import json
import math
import random
import struct
import wave
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tilewright.types import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

NUM_SHAPES = 24
JPEG_QUALITY = 85
# The frame rate at which models such as Qwen's sample: all frames are used.
VIDEO_FPS = 2
SOUND_RATE = 16_000
SYLLABLES_PER_SECOND = 4


def draw(size: tuple[int, int], chance: random.Random) -> Image:
    """Draw ellipses and rectangles over smooth colours."""
    from PIL import Image, ImageDraw

    width, height = size
    image = Image.frombytes("RGB", (4, 4), chance.randbytes(48)).resize(size, Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    for _ in range(NUM_SHAPES):
        left, top = chance.randrange(width), chance.randrange(height)
        right, bottom = left + chance.randint(1, 1 + width // 4), top + chance.randint(1, 1 + height // 4)
        shape = chance.choice((pen.ellipse, pen.rectangle))
        shape((left, top, right, bottom), fill=tuple(chance.randbytes(3)))
    return image


def image_url(size: tuple[int, int], format: str, chance: random.Random) -> str:
    """Return a drawn image as a data URL; `format` is jpeg or png."""
    file = io.BytesIO()
    draw(size, chance).save(file, format, quality=JPEG_QUALITY)
    return _data_url(f"image/{format}", file.getvalue())


def video_url(size: tuple[int, int], num_frames: int, chance: random.Random) -> str:
    """Return a drawn image that moves to the left, as an MP4 in a data URL. Sides must be even."""
    import av
    from PIL import ImageChops

    image = draw(size, chance)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        # FFmpeg's own encoder, which every build has, so that a seed is the same work everywhere.
        stream = container.add_stream("mpeg4", rate=VIDEO_FPS)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for index in range(num_frames):
            shifted = ImageChops.offset(image, -index * size[0] // num_frames, 0)
            container.mux(stream.encode(av.VideoFrame.from_image(shifted)))
        container.mux(stream.encode(None))
    return _data_url("video/mp4", file.getvalue())


def sound_base64(seconds: float, chance: random.Random) -> str:
    """Return tones that rise and fall like syllables, as a mono WAV of 16 kHz in base64."""
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


PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# Short, common words: each, with the space before it, is one token of nearly every vocabulary.
_TEXT = """river stone garden window yellow quiet morning bread letter winter paper silver bridge farmer island market
summer horse candle forest corner mirror basket doctor kitchen planet copper shoulder thunder village bottle engine
sailor pocket blanket feather harbor ladder meadow needle orange pepper rabbit saddle temple valley wagon cotton dragon
flower guitar hammer jacket lemon magnet napkin ocean pencil rocket spider ticket violin wallet zebra"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True)
class WorkloadRequest:
    """A body ready to send, and the number of output tokens that it requests."""

    number: int
    body: bytes
    output_tokens: int


@dataclass(frozen=True)
class Workload:
    """The parameters of all requests. Ranges include both ends; sizes are width and height."""

    model: str
    endpoint: str = "chat"
    prompt_tokens: tuple[int, int] = (128, 128)  # words of the prompt, without tokens of template and media
    output_tokens: tuple[int, int] = (64, 64)
    shared_prefix_tokens: int = 0
    system: str = ""
    pictures: int = 0
    picture_size: tuple[int, int] = (512, 512)
    picture_format: str = "jpeg"
    videos: int = 0
    video_size: tuple[int, int] = (320, 240)
    video_frames: int = 16
    sounds: int = 0
    sound_seconds: float = 10.0
    same_media: bool = False
    temperature: float = 0.0
    seed: int = 0
    is_plain: bool = False  # only OpenAI's own fields
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.endpoint == "completions" and (self.pictures or self.videos or self.sounds or self.system):
            raise RequestError("--endpoint is completions, expected chat: completions have text only, and no --system")
        for flag, (least, most) in (("prompt", self.prompt_tokens), ("output", self.output_tokens)):
            if not 1 <= least <= most:
                raise RequestError(f"--{flag}-tokens is {least}-{most}, expected a range such as 64-256")
        if self.videos and any(side % 2 for side in self.video_size):
            width, height = self.video_size
            raise RequestError(f"--video-size is {width}x{height}, expected even sides: colours are stored in pairs")

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    def requests(self, numbers: Iterable[int]) -> Iterator[WorkloadRequest]:
        """Return the requests of these numbers; each number has its own prompt and media, the same in every run."""
        return (self._request(number) for number in numbers)

    def _request(self, number: int) -> WorkloadRequest:
        chance = random.Random(f"{self.seed} {number}")
        num_words = chance.randint(*self.prompt_tokens)
        output_tokens = chance.randint(*self.output_tokens)
        text = " ".join(chance.choices(WORDS, k=num_words))
        body: dict[str, Any] = {
            "model": self.model,
            **(self._messages(text, number) if self.endpoint == "chat" else {"prompt": self._joined(text)}),
            "max_tokens": output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self.is_plain:
            body |= {"ignore_eos": True, "min_tokens": output_tokens}
        body |= self.extra
        # null removes a field: some servers refuse max_tokens and need another name.
        body = {name: value for name, value in body.items() if value is not None}
        return WorkloadRequest(number, json.dumps(body).encode(), output_tokens)

    @property
    def _shared_words(self) -> str:
        return " ".join(random.Random(f"{self.seed} shared").choices(WORDS, k=self.shared_prefix_tokens))

    def _joined(self, *texts: str) -> str:
        return " ".join(text for text in (self._shared_words, *texts) if text)

    def _messages(self, text: str, number: int) -> dict[str, Any]:
        parts = [*self._media(number), {"type": "text", "text": text}]
        system = " ".join(part for part in (self.system, self._shared_words) if part)
        messages = [{"role": "system", "content": system}] if system else []
        # Text without media is sent as a string, which every server accepts.
        return {"messages": [*messages, {"role": "user", "content": parts if len(parts) > 1 else text}]}

    def _media(self, number: int) -> Iterator[dict[str, Any]]:
        whose = "every" if self.same_media else number
        for index in range(self.pictures):
            chance = random.Random(f"{self.seed} {whose} picture {index}")
            url = image_url(self.picture_size, self.picture_format, chance)
            yield {"type": "image_url", "image_url": {"url": url}}
        for index in range(self.videos):
            chance = random.Random(f"{self.seed} {whose} video {index}")
            url = video_url(self.video_size, self.video_frames, chance)
            yield {"type": "video_url", "video_url": {"url": url}}
        for index in range(self.sounds):
            chance = random.Random(f"{self.seed} {whose} sound {index}")
            data = sound_base64(self.sound_seconds, chance)
            yield {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
