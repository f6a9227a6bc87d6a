"""Parts of messages in all forms that clients send, and the media among them."""

import base64
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from tilewright.inputs.media import MediaLimits
from tilewright.inputs.messages import normalize
from tilewright.types import RequestError


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_parts_of_all_forms_in_order():
    array = np.zeros((4, 4, 3), dtype=np.uint8)
    messages = [
        {"role": "system", "content": "s"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": data_url(b"one"), "detail": "low"}},
                {"type": "text", "text": "t"},
                {"type": "video_url", "video_url": {"url": data_url(b"two", "video/mp4")}},
                {"type": "image", "image": array},
                {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"four").decode(), "format": "mp3"}},
                {"type": "image_url", "image_url": "data:,five%20"},
                {"type": "video", "video": Path("six.mp4"), "fps": 3},
                "plain",
            ],
            "name": "someone",
        },
    ]
    normalized, media = normalize(messages)
    assert [medium.name for medium in media] == ["image 1", "video 1", "image 2", "audio 1", "image 3", "video 2"]
    assert [medium.source for medium in media if medium.name != "image 2"] == [
        b"one", b"two", b"four", b"five ", Path("six.mp4"),
    ]  # fmt: skip
    assert media[2].source is array and media[5].fps == 3.0 and media[0].fps is None
    assert normalized[0] == {"role": "system", "content": "s"}
    assert normalized[1]["content"] == [
        {"type": "image"},
        {"type": "text", "text": "t"},
        {"type": "video"},
        {"type": "image"},
        {"type": "audio"},
        {"type": "image"},
        {"type": "video"},
        {"type": "text", "text": "plain"},
    ]
    assert normalized[1]["name"] == "someone"


@pytest.mark.parametrize(
    "part,message",
    [
        ({"type": "image_url", "image_url": {"url": "https://a/b"}}, "image 1: https://a/b is not fetched here"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "image 1: the URL begins with '/etc/passwd'"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "expected data:, http: or https:"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,§§"}}, "the data: URL is not base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png"}}, "image 1: the data: URL has no comma"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "image 1: it is empty"),
        ({"type": "image_url", "image_url": {"url": data_url(bytes(200))}}, "2.. bytes or more, the limit is 99"),
        ({"type": "image_url", "image_url": {}}, "image_url is {}"),
        ({"type": "image"}, 'a part of type image has no "image"'),
        ({"type": "video", "video": b"x", "fps": 0}, "video 1: fps is 0, expected more than 0"),
        (7, "a part of a message is a int"),
        ({"type": "file", "file": {"file_data": "x"}}, "a part of a message is of type 'file'"),
        ({"type": "file", "text": "x"}, "a part of a message is of type 'file'"),
        ({"type": "thinking", "thinking": "x"}, "a part of a message is of type 'thinking'"),
        ({"type": "text", "text": "x", "image": "y"}, "a part of a message is of type 'text'"),
        ({"type": "text"}, "a part of type text has None"),
        ({"text": ["x"]}, "a part of type text has \\['x'\\]"),
        ({"type": "image", "image": b"x", "max_pixels": 50176}, "image 1: max_pixels is given"),
    ],
    ids=str,
)  # fmt: skip
def test_parts_that_cannot_be_taken(part, message):
    with pytest.raises(RequestError, match=message):
        normalize([{"role": "user", "content": [part]}], limits=MediaLimits(max_bytes=99))


def test_base64_in_a_url_may_be_percent_encoded():
    data = bytes(range(256))
    encoded = quote(base64.b64encode(data).decode(), safe="")
    assert "%2B" in encoded and "%3D" in encoded
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    for limits in (MediaLimits(), MediaLimits(max_bytes=258)):  # what 344 characters may carry
        assert normalize([{"role": "user", "content": [part]}], limits=limits)[1][0].source == data
    with pytest.raises(RequestError, match="the limit is 250"):
        normalize([{"role": "user", "content": [part]}], limits=MediaLimits(max_bytes=250))


def test_a_url_of_frames():
    """As vLLM takes videos: JPEG frames one by one, with commas between."""
    frames = [b"one", b"two!", b"three"]
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)
    part = {"type": "video_url", "video_url": {"url": url}, "fps": 2}
    _, (medium,) = normalize([{"role": "user", "content": [part]}])
    assert (medium.kind, medium.source, medium.fps) == ("video", frames, 2.0)
    part["video_url"]["url"] += ",§"
    with pytest.raises(RequestError, match="video 1, frame 4: the data: URL is not base64"):
        normalize([{"role": "user", "content": [part]}])
    with pytest.raises(RequestError, match="media are more than 11 bytes"):
        part["video_url"]["url"] = url
        normalize([{"role": "user", "content": [part]}], limits=MediaLimits(max_total_bytes=11))


def test_parts_that_are_text_by_another_name():
    parts = [{"text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "refusal", "refusal": "no"}]
    normalized, _ = normalize([{"role": "assistant", "content": parts}])
    assert normalized[0]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "no"}]


def test_too_many_and_unwanted_items():
    content = [{"type": "image", "image": b"x"}] * 3
    with pytest.raises(RequestError, match="image 3: the request has more than 2 images"):
        normalize([{"role": "user", "content": content}], limits=MediaLimits(max_items=2))
    with pytest.raises(RequestError, match="image 1: SmolLM accepts text only"):
        normalize([{"role": "user", "content": content}], accepts=(), model="SmolLM")
    with pytest.raises(RequestError, match="content is a int"):
        normalize([{"role": "user", "content": 3}])
    with pytest.raises(RequestError, match="a message is a str"):
        normalize(["hello"])


def test_the_sound_of_a_video():
    video, silent = (
        {"type": "video", "video": b"clip"},
        {"type": "video", "video": b"clip", "use_audio_in_video": False},
    )
    content = [video, silent, {"type": "image", "image": b"still"}]
    messages = [{"role": "user", "content": content}]
    for wanted in (False, True):
        _, media = normalize(messages, use_audio_in_video=wanted)
        assert [part.with_sound for part in media] == [wanted, False, False]
    with pytest.raises(RequestError, match="video 1: use_audio_in_video is true, but the model accepts no sound"):
        normalize(messages, accepts=("image", "video"), use_audio_in_video=True)
    with pytest.raises(RequestError, match="use_audio_in_video is 'yes', expected true or false"):
        normalize([{"role": "user", "content": [{**video, "use_audio_in_video": "yes"}]}])
