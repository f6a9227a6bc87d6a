import asyncio
import base64

import pytest
from media_origin import Names, ok, serving

from tilewright.inputs.media import MediaLimits
from tilewright.inputs.messages import normalize
from tilewright.server.media import fetch
from tilewright.server.media.fetch import Fetcher
from tilewright.server.media.gate import MediaGate, MediaPolicy
from tilewright.types import RequestError

SHORT = "it does not end with a complete group of four characters, padded with ="
DATA_URL = "data:image/png;base64," + base64.b64encode(b"inline").decode()


@pytest.fixture(autouse=True)
def public_loopback(monkeypatch):
    real = fetch.is_public
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1" or real(address))


def resolve(content, answers=None, **policy):
    """(the parts that come out, or the error; the origin). U stands for the origin's address."""

    async def run():
        async with serving(answers or {}) as origin:
            names = {"u": [["127.0.0.1"]]}
            fetcher = Fetcher(max_redirects=3, timeout_s=10, allow_private=False, resolve=Names(names))
            gate = MediaGate(MediaPolicy(**policy), fetcher)
            parts = [_with_port(part, f"http://u:{origin.port}") for part in content]
            messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": parts, "name": "me"}]
            try:
                resolved = await gate.resolve(messages)
            except RequestError as error:
                return str(error), origin
            finally:
                await gate.close()
            assert resolved[0] == messages[0] and resolved[1].keys() == messages[1].keys()
            return resolved[1]["content"], origin

    return asyncio.run(run())


def _with_port(value, address):
    if isinstance(value, str):
        return value.replace("U/", f"{address}/")
    if isinstance(value, dict):
        return {key: _with_port(item, address) for key, item in value.items()}
    return [_with_port(item, address) for item in value] if isinstance(value, list) else value


def picture(url):
    return {"type": "image_url", "image_url": {"url": url}}


def test_every_form_of_part(tmp_path):
    (tmp_path / "f.png").write_bytes(b"file")
    answers = {f"/{name}": ok(name.encode()) for name in "abcdefg"}
    content = [
        {"type": "text", "text": "U/a is a URL, and this is text"},
        {"type": "image_url", "image_url": {"url": "U/a", "detail": "low"}, "cache_control": {"type": "ephemeral"}},
        {"type": "image_url", "image_url": "U/b"},
        {"type": "video_url", "video_url": {"url": "U/c"}, "fps": 2},
        {"type": "image", "image": "U/d"},
        {"type": "video", "video": ["U/e", DATA_URL, f"{tmp_path}/f.png"], "fps": 4},
        {"type": "audio_url", "audio_url": {"url": "U/f"}},
        {"image_url": {"url": "U/g"}},
        {"type": "image", "image": f"file://{tmp_path}/f.png"},
        {"type": "image", "image": f"{tmp_path}/f.png"},
        picture(DATA_URL),
        {"type": "image", "image": "data:,a%20b"},
        {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,b25l,dHdv"}, "fps": 8},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        "a bare text",
    ]
    resolved, origin = resolve(content, answers, folders=(tmp_path,))
    assert resolved == [
        content[0] | {"text": resolved[0]["text"]},
        {"type": "image", "image": b"a", "cache_control": {"type": "ephemeral"}},
        {"type": "image", "image": b"b"},
        {"type": "video", "video": b"c", "fps": 2},
        {"type": "image", "image": b"d"},
        {"type": "video", "video": [b"e", b"inline", b"file"], "fps": 4},
        {"type": "audio", "audio": b"f"},
        {"type": "image", "image": b"g"},
        {"type": "image", "image": b"file"},
        {"type": "image", "image": b"file"},
        {"type": "image", "image": b"inline"},
        {"type": "image", "image": b"a b"},
        {"type": "video", "video": [b"one", b"two"], "fps": 8},
        {"type": "audio", "audio": b"\x00\x00\x00"},
        "a bare text",
    ]
    assert sorted(origin.paths) == [f"/{name}" for name in "abcdefg"]
    # The engine takes it, though it reads no files and fetches nothing.
    _, media = normalize([{"role": "user", "content": resolved}], limits=MediaLimits(allow_paths=False))
    assert [medium.name for medium in media][:3] == ["image 1", "image 2", "video 1"]


def test_a_url_that_comes_twice_is_fetched_once():
    content = [picture("U/a"), {"type": "image", "image": "U/a"}, {"type": "video", "video": ["U/a", "U/b", "U/a"]}]
    resolved, origin = resolve(content, {"/a": ok(b"a"), "/b": ok(b"b")})
    assert [part[part["type"]] for part in resolved] == [b"a", b"a", [b"a", b"b", b"a"]]
    assert sorted(origin.paths) == ["/a", "/b"]


def test_a_request_has_a_few_connections_at_once():
    async def slowly(writer):
        await asyncio.sleep(0.05)
        writer.write(ok(b"x"))

    content = [picture(f"U/{index}") for index in range(24)]
    resolved, origin = resolve(content, {f"/{index}": slowly for index in range(24)})
    assert len(resolved) == 24 and 2 <= origin.most_open <= 8


@pytest.mark.parametrize(
    "part,message",
    [
        (picture("U/missing"), "image 2: http://u:PORT/missing: the server answered 404"),
        (picture("http://me:secret@u/a"), "image 2: http://u/a: the URL names a user, expected none"),
        (picture("http://127.0.0.2/" + "x" * 200),
         f"image 2: http://127.0.0.2/{'x' * 80}...: its host has an address that is not public, or none"),
        (picture("U/empty"), "image 2: it is empty"),
        (picture("U/large"), "image 2: http://u:PORT/large: 101 bytes, the limit is 100"),
        (picture("ftp://u/a"), "image 2: the URL begins with 'ftp://u/a', expected data:, http:, https: or file:"),
        (picture("/etc/passwd"), "image 2: the URL begins with '/etc/passwd', expected data:, http:, https: or file:"),
        (picture("file:///etc/passwd"),
         "image 2: file:///etc/passwd: files are read only from folders given with --allow-files DIR"),
        ({"type": "image", "image": "/etc/passwd"},
         "image 2: /etc/passwd: files are read only from folders given with --allow-files DIR"),
        ({"type": "video", "video": [DATA_URL, "U/missing"]},
         "video 1, frame 2: http://u:PORT/missing: the server answered 404"),
        ({"type": "video", "video": [DATA_URL] * 5}, "video 1: 5 frames, the limit is 4 (--max-frames)"),
        ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,YQ,YQ,YQ,YQ,YQ"}},
         "video 1: 5 frames, the limit is 4 (--max-frames)"),
        (picture("data:image/png;base64," + "A" * 140),
         "image 2: 105 bytes or more, the limit is 100 (--max-media-bytes)"),
        (picture("data:image/png"), "image 2: the data: URL has no comma"),
        (picture("data:image/png;base64,"), "image 2: it is empty"),
        (picture("data:image/png;base64,AAA"), "image 2: the data: URL is not base64: " + SHORT),
        (picture("data:image/png;base64,A/§="),
         "image 2: the data: URL is not base64: it has '\\xa7', expected letters, digits, + and /"),
        (picture("data:," + "%" * 101), "image 2: 101 bytes or more, the limit is 100 (--max-media-bytes)"),
        (picture("data:,\ud800"), "image 2: the data: URL is not text: it has half of a surrogate pair"),
        ({"type": "video", "video": [DATA_URL, "data:image/png;base64,!"]},
         "video 1, frame 2: the data: URL is not base64: 1 characters, one more than a multiple of 4"),
        ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,YQ==,YQ"}},
         "video 1, frame 2: the data: URL is not base64: " + SHORT),
        ({"type": "input_audio", "input_audio": {"data": "YQ", "format": "wav"}},
         "audio 1: the data: URL is not base64: " + SHORT),
        (picture("http://u/" + "x" * 9000), "image 2: the URL has 9009 characters, the limit is 8192"),
        ({"type": "image_url", "image_url": {}}, 'image_url is {}, expected {"url": ...}'),
    ],
)  # fmt: skip
def test_errors_name_the_item(part, message):
    missing = b"HTTP/1.1 404 Not here\r\nContent-Length: 6\r\n\r\nsecret"
    answers = {"/a": ok(b"a"), "/missing": missing, "/empty": ok(b""), "/large": ok(b"x" * 101)}
    error, origin = resolve([picture("U/a"), part], answers, limits=MediaLimits(max_bytes=100, max_frames=4))
    assert error == message.replace("PORT", str(origin.port))


def test_too_many_items_are_not_fetched():
    error, origin = resolve([picture(f"U/{index}") for index in range(4)], limits=MediaLimits(max_items=3))
    assert (
        error == "image 4: the request has more than 3 images, videos and sounds, the limit (--max-media)"
        and origin.requests == []
    )


def test_all_items_together():
    """Each use of a source counts: each is a copy for the engine."""
    answers = {"/a": ok(b"x" * 60), "/b": ok(b"x" * 60)}
    limits = MediaLimits(max_bytes=100, max_total_bytes=119)
    for content in (
        [picture("U/a"), picture("U/b")],
        [picture("U/a")] * 2,
        [picture("data:," + "x" * 60), picture("U/a")],
    ):
        error, _ = resolve(content, answers, limits=limits)
        assert error.endswith(": the request's media are more than 119 bytes, the limit")
    assert len(resolve([picture("U/a"), picture("U/b")], answers, limits=MediaLimits(max_total_bytes=120))[0]) == 2


def test_percent_signs_do_not_make_room_for_others():
    """A "%" counts as a third of an escape before it is decoded: many of them alone must not count below zero."""
    content = [picture("data:," + "%" * 90), picture("data:," + "x" * 60)]
    error, _ = resolve(content, limits=MediaLimits(max_bytes=100, max_total_bytes=119))
    assert error.endswith(": the request's media are more than 119 bytes, the limit")


@pytest.mark.parametrize("num_bytes", [30, 3 << 20])  # decoded on the event loop, and by a thread
def test_the_text_of_a_data_url_is_no_longer_counted_once_it_is_decoded(num_bytes):
    data = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    held = [len(url)]  # the body was counted as it came

    async def run():
        gate = MediaGate(MediaPolicy())
        try:
            return await gate.resolve([{"role": "user", "content": [picture(url)]}], held.append)
        finally:
            await gate.close()

    (message,) = asyncio.run(run())
    assert message["content"] == [{"type": "image", "image": data}]
    assert held[1] >= num_bytes and sum(held) == num_bytes


def test_the_rest_is_given_up_when_one_fails():
    is_given_up = []

    async def never(writer):
        try:
            await asyncio.sleep(30)
        finally:
            is_given_up.append(True)

    async def fail(writer):
        writer.write(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")

    error, _ = resolve([picture("U/never"), picture("U/fail")], {"/never": never, "/fail": fail})
    assert error.startswith("image 2: ") and error.endswith("the server answered 500")


def test_the_client_may_leave_during_a_fetch():
    async def run():
        async def never(writer):
            await asyncio.sleep(30)

        async with serving({"/a": never}) as origin:
            fetcher = Fetcher(max_redirects=3, timeout_s=10, allow_private=False, resolve=Names({"u": [["127.0.0.1"]]}))
            gate = MediaGate(MediaPolicy(), fetcher)
            message = {"role": "user", "content": [picture(f"http://u:{origin.port}/a")]}
            task = asyncio.create_task(gate.resolve([message]))
            while not origin.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert [other for other in asyncio.all_tasks() if "resolve" in repr(other)] == []
            await gate.close()

    asyncio.run(run())


def test_messages_of_other_forms_pass_as_they_are():
    """The engine says what is wrong with them."""
    messages = [{"role": "user", "content": "text"}, {"role": "assistant", "content": None, "tool_calls": []}, {}, 7,
                {"role": "user", "content": [None, 3, {"type": "text"}, {"type": "image", "image": 5}]}]  # fmt: skip

    async def run():
        gate = MediaGate(MediaPolicy())
        try:
            return await gate.resolve(messages)
        finally:
            await gate.close()

    assert asyncio.run(run()) == messages
