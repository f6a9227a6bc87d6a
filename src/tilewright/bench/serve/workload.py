"""The requests, made from a seed: the same for every server."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tilewright.bench.serve import media
from tilewright.types import RequestError

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# Short and common: with the space before it each is one token of nearly every vocabulary.
_TEXT = """river stone garden window yellow quiet morning bread letter winter paper silver bridge farmer island market
summer horse candle forest corner mirror basket doctor kitchen planet copper shoulder thunder village bottle engine
sailor pocket blanket feather harbor ladder meadow needle orange pepper rabbit saddle temple valley wagon cotton dragon
flower guitar hammer jacket lemon magnet napkin ocean pencil rocket spider ticket violin wallet zebra"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True)
class Request:
    """A body ready to be sent, and the number of output tokens it requests."""

    number: int
    body: bytes
    output_tokens: int


@dataclass(frozen=True)
class Workload:
    """The parameters of all requests. Ranges include both ends; sizes are width and height."""

    model: str
    endpoint: str = "chat"
    prompt_tokens: tuple[int, int] = (128, 128)  # words of the prompt; tokens of the template and the media come on top
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
            raise RequestError("--endpoint is completions, expected chat: it takes text alone, and no --system")
        for flag, (least, most) in (("prompt", self.prompt_tokens), ("output", self.output_tokens)):
            if not 1 <= least <= most:
                raise RequestError(f"--{flag}-tokens is {least}-{most}, expected such as 64-256")
        if self.videos and any(side % 2 for side in self.video_size):
            width, height = self.video_size
            raise RequestError(f"--video-size is {width}x{height}, expected even sides: colours are stored in pairs")

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    def requests(self, numbers: Iterable[int]) -> Iterator[Request]:
        """The requests of these numbers: each number has its own prompt and media, the same every time."""
        return (self._request(number) for number in numbers)

    def _request(self, number: int) -> Request:
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
        # null removes a field: some servers refuse max_tokens and need another name for it.
        body = {name: value for name, value in body.items() if value is not None}
        return Request(number, json.dumps(body).encode(), output_tokens)

    @property
    def _shared_words(self) -> str:
        return " ".join(random.Random(f"{self.seed} shared").choices(WORDS, k=self.shared_prefix_tokens))

    def _joined(self, *texts: str) -> str:
        return " ".join(text for text in (self._shared_words, *texts) if text)

    def _messages(self, text: str, number: int) -> dict[str, Any]:
        parts = [*self._media(number), {"type": "text", "text": text}]
        system = " ".join(part for part in (self.system, self._shared_words) if part)
        messages = [{"role": "system", "content": system}] if system else []
        # Text alone is sent as a string, which every server accepts.
        return {"messages": [*messages, {"role": "user", "content": parts if len(parts) > 1 else text}]}

    def _media(self, number: int) -> Iterator[dict[str, Any]]:
        whose = "every" if self.same_media else number
        for index in range(self.pictures):
            chance = random.Random(f"{self.seed} {whose} picture {index}")
            url = media.picture_url(self.picture_size, self.picture_format, chance)
            yield {"type": "image_url", "image_url": {"url": url}}
        for index in range(self.videos):
            chance = random.Random(f"{self.seed} {whose} video {index}")
            url = media.video_url(self.video_size, self.video_frames, chance)
            yield {"type": "video_url", "video_url": {"url": url}}
        for index in range(self.sounds):
            chance = random.Random(f"{self.seed} {whose} sound {index}")
            data = media.sound_base64(self.sound_seconds, chance)
            yield {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
