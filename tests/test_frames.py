"""Messages between processes come out as they went in, within their bound, whichever way they are read."""

import os
import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.process.frames import HEAD, Channel, FrameError, decode, encode, until

texts = st.text(st.characters(codec=None), max_size=20)  # lone surrogates too: JSON from clients may have them
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts | st.binary(max_size=50)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=20
)


def through(message):
    frame, reading, at = b"".join(encode(message)), decode(), 0
    wanted = next(reading)
    try:
        while True:
            part, at = frame[at : at + wanted], at + wanted
            wanted = reading.send(part)
    except StopIteration as end:
        assert at == len(frame)
        return end.value


@given(st.dictionaries(texts, values, max_size=4))
def test_messages(message):
    assert through(message) == message


def test_blobs_are_written_as_they_are():
    """Raw behind the JSON, and not a copy of them: a video has tens of megabytes."""
    image, sound = b"\x00\xff" * 500, b"RIFF"
    head, *blobs = encode({"messages": [{"image": image}, {"audio": sound}]})
    assert blobs[0] is image and blobs[1] is sound
    assert image not in head and len(head) < 200


@pytest.fixture
def pair():
    ends = [Channel(end, max_bytes=1 << 20) for end in socket.socketpair()]
    yield ends
    for end in ends:
        end.close()


def test_channels_carry_more_than_a_socket_holds(pair):
    message = {"text": "ü" * 100_000, "bytes": [os.urandom(700_000), b""]}
    for left_s in (None, until(60.0)):
        sender = threading.Thread(target=pair[0].send, args=(message,), kwargs={"left_s": left_s})
        sender.start()
        assert pair[1].receive(left_s) == message
        sender.join()


@pytest.mark.parametrize(
    "text", [b"{}", b"[]", b"null", b"[{},[],[1]]", b"[" * 10_000, b"\xff", b'[{},[["a","b"]],[0]]']
)
def test_what_is_no_message(pair, text):
    pair[0].connection.sendall(HEAD.pack(len(text)) + text)
    with pytest.raises(FrameError):
        pair[1].receive()


def test_bounds(pair):
    pair[0].connection.sendall(struct.pack("<Q", 1 << 21))
    with pytest.raises(FrameError, match="a message of 2097152 bytes, the limit is 1048576"):
        pair[1].receive()
    pair[1].connection.sendall(HEAD.pack(23) + b'[{},[["a"]],[99999999]]')
    with pytest.raises(FrameError, match="a message of 99999999 bytes"):
        pair[0].receive()


def test_an_end_is_none_also_in_the_middle_of_a_message(pair):
    pair[0].connection.sendall(HEAD.pack(100) + b"[{}")
    pair[0].close()
    assert pair[1].receive() is None and pair[1].receive(until(1.0)) is None


def test_a_time_is_up(pair):
    pair[0].connection.sendall(HEAD.pack(100) + b"[{}")
    with pytest.raises(TimeoutError):
        pair[1].receive(until(0.01))
    with pytest.raises(TimeoutError):
        pair[0].send({"bytes": bytes(1 << 22)}, left_s=until(0.01))


def test_descriptors_go_with_a_message(pair):
    reading, writing = os.pipe()
    pair[0].send({"with": "two", "bytes": b"abc"}, [reading, writing])
    pair[0].send({"with": "none"})
    files = []
    assert pair[1].receive(fds=files) == {"with": "two", "bytes": b"abc"}
    assert pair[1].receive(fds=files) == {"with": "none"}
    os.write(files[1], b"x")
    assert len(files) == 2 and os.read(reading, 1) == b"x"
    for fd in (reading, writing, *files):
        os.close(fd)
