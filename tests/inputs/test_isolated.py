"""Media decoded by other processes: the same results, and no way for a file to reach this one."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from clips import bitmap_header, write_clip
from PIL import Image
from sounds import wav

from tilewright.inputs.isolation.opener import IsolatedOpener, MediaFault, Opener
from tilewright.inputs.isolation.pool import DecoderProcess
from tilewright.inputs.media import MediaLimits, MediaPart
from tilewright.process import child, confine, frames
from tilewright.types import RequestError, TransientError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def opener():
    opener = IsolatedOpener()
    yield opener
    opener.close()


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip") / "a.mp4", 40, options={"g": "10"})


def encode(image, format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def noise(height=60, width=80):
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


def picture_part(data, name="image 3"):
    return MediaPart("image", name, data)


def processes(opener):
    return [process.pid for process in opener.pool._idle]


def is_running(pid):
    return os.path.exists(f"/proc/{pid}")


PICTURES = {
    "png": lambda: encode(noise()),
    "jpeg": lambda: encode(noise(), "JPEG"),
    "webp": lambda: encode(noise(), "WEBP"),
    "gif": lambda: encode(noise(), "GIF"),
    "bmp": lambda: encode(noise(), "BMP"),
    "cmyk": lambda: encode(noise().convert("CMYK"), "JPEG"),
    "clear palette": lambda: encode(noise().quantize(16), transparency=3),
    "16 bits": lambda: encode(Image.fromarray(np.arange(4800).reshape(60, 80).astype(np.uint16) * 13)),
    "animation": lambda: encode(noise(), "WEBP", save_all=True, append_images=[noise()]),
    **{
        f"turned {format}": lambda format=format: encode(noise(), format, exif=turned())
        for format in ("JPEG", "PNG", "WEBP")
    },
}


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    exif.get_ifd(0x8769)[0x9286] = b"ASCII\0\0\0hello"
    return exif.tobytes()


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_as_if_decoded_here(opener, name):
    data = PICTURES[name]()
    here = Opener().open_image(picture_part(data), MediaLimits())
    there = opener.open_image(picture_part(data), MediaLimits())
    assert dataclasses.replace(there, decode=here.decode) == here
    pixels = there.decode()
    assert np.array_equal(pixels, here.decode()) and pixels.flags.writeable and pixels.flags.c_contiguous
    assert np.array_equal(there.decode(), pixels), "a second time"


def test_videos_are_as_if_decoded_here(opener, clip, tmp_path):
    even = clip
    uneven = write_clip(tmp_path / "b.mp4", 20, times_ms=[40 * index + (index > 10) * 900 for index in range(20)])
    others = [noise().rotate(90), noise().rotate(180)]
    gif = encode(noise(), "GIF", save_all=True, append_images=others, duration=100)
    for data in (even, uneven, gif):
        part = MediaPart("video", "video 1", data)
        here, there = Opener().open_video(part, MediaLimits()), opener.open_video(part, MediaLimits())
        assert dataclasses.replace(there, frames=here.frames) == here
        last = here.num_frames - 1
        for indices in ([0], [0, 1, last], list(range(last + 1)), [0, 0, last]):
            frames = list(there.frames(indices))
            assert np.array_equal(np.stack(frames), np.stack(list(here.frames(indices))))


def test_lists_of_pictures_are_decoded_there_too(opener):
    part = MediaPart("video", "video 1", [encode(noise()), encode(noise(), "BMP"), np.asarray(noise())], 2.0)
    here, there = Opener().open_video(part, MediaLimits()), opener.open_video(part, MediaLimits())
    assert there.digest == here.digest
    assert np.array_equal(np.stack(list(there.frames([0, 1, 2]))), np.stack(list(here.frames([0, 1, 2]))))
    with pytest.raises(RequestError, match=r"^video 1, frame 2: not an image"):
        opener.open_video(MediaPart("video", "video 1", [encode(noise()), b"no picture"]), MediaLimits())


def test_sounds_are_as_if_decoded_here(opener):
    part = MediaPart("audio", "audio 1", wav(np.sin(np.arange(12_000) / 7)[:, None], 12_000))
    for rate in (12_000, 16_000):
        here, there = (each.open_sound(part, MediaLimits(), rate) for each in (Opener(), opener))
        assert dataclasses.replace(there, decode=here.decode) == here
        assert np.array_equal(there.decode(), here.decode())


@pytest.mark.parametrize(
    "data,limits,message",
    [
        (b"no picture", {}, "image 3: not an image that can be read, expected PNG, JPEG, WEBP, GIF, BMP"),
        (encode(noise()), {"max_pixels": 4000}, "image 3: 80 x 60 = 4800 pixels, the limit is 4000 \\(--max-pixels\\)"),
        (encode(noise()), {"max_bytes": 50}, "image 3: .* bytes or more, the limit is 50 \\(--max-media-bytes\\)"),
        (b"", {}, "image 3: it is empty"),
        (encode(noise())[:200], {}, "image 3: cannot be decoded: the file is damaged, cut short"),
        ("no/such.png", {}, "image 3: no/such.png cannot be read"),
        (3, {}, "image 3: it is a int, expected bytes"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_errors_are_those_of_decoding_here(opener, data, limits, message):
    before = processes(opener)
    for each in (opener, Opener()):
        with pytest.raises(RequestError, match=f"^{message}") as caught:
            each.open_image(picture_part(data), MediaLimits(**limits)).decode()
        assert not isinstance(caught.value, MediaFault)
    assert processes(opener) == before, "a refused file costs no process"


def test_the_only_limit_of_pixels_is_ours(opener):
    """Pillow's own is lower than what --max-pixels may be."""
    data = bitmap_header(20_000)
    with pytest.raises(
        RequestError, match=r"20000 x 20000 = 400000000 pixels, the limit is 67108864 \(--max-pixels\)$"
    ):
        opener.open_image(picture_part(data), MediaLimits())
    assert opener.open_image(picture_part(data), MediaLimits(max_pixels=10**9)).width == 20_000


def test_nothing_is_decoded_until_it_is_asked_for(opener):
    """The header is read; the pixels behind it, which are broken, are not."""
    data = bytearray(encode(noise()))
    data[data.index(b"IDAT") + 30] ^= 255
    picture = opener.open_image(picture_part(bytes(data)), MediaLimits())
    assert (picture.height, picture.width) == (60, 80)
    with pytest.raises(RequestError, match="image 3: cannot be decoded"):
        picture.decode()


def test_arrays_and_open_pictures_stay_here(opener):
    opener = IsolatedOpener()
    assert opener.open_image(picture_part(noise()), MediaLimits()).decode().shape == (60, 80, 3)
    assert (
        opener.open_video(MediaPart("video", "video 1", np.zeros((3, 8, 8, 3), np.uint8)), MediaLimits()).num_frames
        == 3
    )
    assert processes(opener) == []


def test_a_process_is_kept_for_the_next_item():
    opener = IsolatedOpener(max_items_per_process=3)
    data, seen = encode(noise()), []
    for _ in range(7):
        opener.open_image(picture_part(data), MediaLimits()).decode()
        seen.append(processes(opener)[-1])
    assert len(set(seen)) == 3 and seen[0] == seen[1] and seen[2] != seen[1], "three items each, then another"
    opener.close()
    assert not any(is_running(pid) for pid in seen)
    with pytest.raises(RuntimeError, match="closed"):
        opener.open_image(picture_part(data), MediaLimits())


BOOT_TAKEN_OVER = """
import sys; sys.path[:] = sys.argv[2:]
import ctypes, fcntl, os, resource, signal, socket, threading, time
import tilewright.inputs.isolation.main as m
from tilewright.process.child import main
from tilewright.types import RequestError
real = m.read_image
def attack(data, name, limits):
    if not data.startswith(b"attack:"):
        return real(data, name, limits)
    space = dict(globals())
    exec(data[7:], space)
    return space["found"]
def noting_fd(channel, shared_fd, memory_bytes):
    globals()["shared_fd"] = shared_fd
    decode(channel, shared_fd, memory_bytes)
m.read_image, m.main, decode = attack, noting_fd, m.main
main()
"""


@pytest.fixture
def taken_over(monkeypatch):
    """An opener whose processes do as the bytes of a picture say: a file has taken them over."""
    monkeypatch.setattr(child, "BOOT", BOOT_TAKEN_OVER)
    opener = IsolatedOpener(memory_bytes=2**28)
    yield opener
    opener.close()


def attack(code):
    return picture_part(b"attack:" + textwrap.dedent(code).encode())


@pytest.mark.parametrize(
    "code,message",
    [
        ("ctypes.string_at(0)", "the process that decoded it died of SIGSEGV"),
        ("os._exit(3)", "the process that decoded it ended with status 3"),
        ("time.sleep(100)", "it took more than 0.5 seconds"),
        ("while True: pass", "it took more than 0.5 seconds"),
        ("keep = [bytes(2**20) for _ in range(2**14)]", "it needs more memory than decoding may use"),
        ("raise KeyError('surprise')", "its decoder failed; the log has the reason"),
        ("import colorsys", "its decoder failed; the log has the reason"),
    ],
)
def test_what_brings_a_decoder_down_costs_the_request_alone(taken_over, code, message):
    good = picture_part(encode(noise()))
    taken_over.open_image(good, MediaLimits()).decode()
    (before,) = processes(taken_over)
    with pytest.raises(MediaFault, match=f"^image 3: cannot be decoded: ({message})"):
        taken_over.open_image(attack(code), MediaLimits(max_decode_s=0.5))
    assert not is_running(before)
    assert taken_over.open_image(good, MediaLimits()).decode().shape == (60, 80, 3)
    assert before not in processes(taken_over)


def kill_when_asked(monkeypatch, asks, number=signal.SIGKILL):
    """Has a process killed when it is asked for the next of these, each once."""
    send, left = DecoderProcess.send, list(asks)

    def sending(process, message):
        if left and message["ask"] == left[0]:
            left.pop(0)
            os.kill(process.pid, number)
        send(process, message)

    monkeypatch.setattr(DecoderProcess, "send", sending)
    return left


def test_an_item_whose_decoder_is_killed_is_decoded_by_another(monkeypatch, clip):
    """By the system that is short of memory, say: while it is opened, and while it is decoded."""
    opener, sound = IsolatedOpener(), wav(np.sin(np.arange(12_000) / 7)[:, None], 12_000)
    for part, open_one, read in [
        (picture_part(encode(noise())), "open_image", lambda picture: picture.decode()),
        (MediaPart("audio", "audio 1", sound), "open_sound", lambda sound: sound.decode()),
        (MediaPart("video", "video 1", clip), "open_video", lambda video: np.stack(list(video.frames([0, 7, 8, 30])))),
    ]:
        more = (16_000,) if open_one == "open_sound" else ()
        asks = ["open", "frame", "frame"] if open_one == "open_video" else ["open", "decode"]
        expected = read(getattr(Opener(), open_one)(part, MediaLimits(), *more))
        left = kill_when_asked(monkeypatch, asks[:2])
        assert np.array_equal(read(getattr(opener, open_one)(part, MediaLimits(), *more)), expected)
        assert not left
        left = kill_when_asked(monkeypatch, 2 * asks[-1:])
        with pytest.raises(TransientError, match=r"1 could not be decoded: .* was ended \(signal SIGKILL\)|image 3"):
            read(getattr(opener, open_one)(part, MediaLimits(), *more))
        assert np.array_equal(read(getattr(opener, open_one)(part, MediaLimits(), *more)), expected)
    opener.close()


def test_a_decoder_that_is_stopped_is_no_fault_of_the_item(monkeypatch):
    opener = IsolatedOpener()
    kill_when_asked(monkeypatch, ["open"], signal.SIGSTOP)
    assert opener.open_image(picture_part(encode(noise())), MediaLimits(max_decode_s=1.0)).height == 60
    opener.close()


FORBIDDEN = [
    "open('/etc/passwd')",
    "open('/dev/null', 'w')",
    "os.stat('/etc/passwd')",
    "os.listdir('/')",
    "os.unlink('/tmp/nothing')",
    "socket.socket()",
    "socket.socketpair()",
    "socket.socket(fileno=os.dup(int(sys.argv[1]))).connect('/tmp/nothing')",
    "os.fork()",
    "os.execv('/bin/true', ['true'])",
    "os.kill(os.getppid(), 0)",
    "os.kill(os.getpid(), 0)",
    "os.memfd_create('x')",
    "os.ftruncate(shared_fd, 0)",
    "os.pwrite(shared_fd, b'x', 0)",
    "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (1, 1))",
    "resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1)) or os.pwrite(shared_fd, b'x', 0)",
    "fcntl.fcntl(int(sys.argv[1]), fcntl.F_SETOWN, os.getppid())",
    "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "os.sched_setaffinity(os.getppid(), {0})",
    "threading.Thread(target=print).start()",
]


@pytest.mark.skipif(
    confine.filter_program(os.uname().machine) is None, reason="the filter does not know this architecture"
)
def test_a_process_that_is_taken_over_can_reach_nothing(taken_over):
    for code in FORBIDDEN:
        outcome = (
            "except (OSError, RuntimeError, ValueError): said = 'no'\nelse: said = 'done'\nraise RequestError(said)"
        )
        with pytest.raises(RequestError) as caught:
            taken_over.open_image(attack(f"try: {code}\n{outcome}"), MediaLimits())
        assert str(caught.value) == "image 3: no", code


def test_a_process_knows_nothing_of_ours(taken_over, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    code = """
        handles = []
        for handle in range(64):
            try:
                os.fstat(handle)
                handles.append(handle)
            except OSError:
                pass
        limits = [resource.getrlimit(name)[1] for name in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE)]
        environment = sorted(name for name in os.environ if not name.startswith("MALLOC_"))
        raise RequestError(repr((environment, len(handles), limits)))
    """
    with open(os.devnull) as ours:
        os.set_inheritable(ours.fileno(), True)
        with pytest.raises(RequestError) as caught:
            taken_over.open_image(attack(code), MediaLimits())
    assert str(caught.value) == f"image 3: {(['LC_ALL', 'OPENBLAS_NUM_THREADS'], 5, [0, 0])!r}"
    (pid,) = processes(taken_over)
    assert os.getsid(pid) == pid


# Replies of a process that is no longer ours.
def reply(message):
    return b"".join(frames.encode(message))


def frame(text, blobs=b""):
    return frames.HEAD.pack(len(text)) + text + blobs


NONSENSE = {
    "nothing": b"",
    "no message": b"\xff" * 8,
    "a text of 4 GB": frames.HEAD.pack(2**32 - 1),
    "bytes of 4 GB": frame(f'[{{"height":5}},[["width"]],[{2**32}]]'.encode()),
    "no JSON": frame(b"{{{{"),
    "deep JSON": frame(b"[" * 60_000),
    "a list": frame(b"[]"),
    "no object": frame(b"[[],[],[]]"),
    "no bytes": frame(b'[{},[["height"]],[-1]]'),
    "half a byte": frame(b'[{},[["height"]],[0.5]]'),
    "bytes nowhere": frame(b'[{},[["height","width"]],[1]]', b"x"),
    "bytes at no path": frame(b"[{},[[]],[1]]", b"x"),
    "bytes at no list": frame(b"[{},[5],[1]]", b"x"),
    "too few bytes": frame(b"[{},[],[1]]", b"x"),
    "no Unicode": frame(b"\xff\xfe\xff\xfe"),
    "a pickle": frame(b"cos\nsystem\n(S'true'\n"),
    "no size": reply({}),
    "a negative size": reply({"height": -1, "width": 5}),
    "no whole size": reply({"height": 1.5, "width": 5}),
    "a size in words": reply({"height": "60", "width": "80"}),
    "true": reply({"height": True, "width": True}),
    "a huge number": frame(b'[{"height": ' + b"9" * 5000 + b"},[],[]]"),
    "not a number": frame(b'[{"height": NaN, "width": 5},[],[]]'),
    "an odd error": reply({"error": "other", "message": {"a": [1]}}),
}


SPEAK = """
import sys; sys.path[:] = sys.argv[2:]
import os, socket
from tilewright.process.frames import Channel
link = socket.socket(fileno=int(sys.argv[1]))
task = Channel(link).receive()
"""


def speaking(monkeypatch, *replies):
    """An opener whose processes send these, one for each message they get."""
    script = f"""{SPEAK}
link.sendall({reply({"missing": []})!r})
for reply in {replies!r}:
    if not link.recv(100_000):
        break
    link.sendall(reply)
link.recv(1)
"""
    monkeypatch.setattr(child, "BOOT", script)
    return IsolatedOpener()


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_from_a_process_harms_nothing(monkeypatch, name):
    opener = speaking(monkeypatch, NONSENSE[name])
    with pytest.raises(MediaFault, match=r"^image 3: cannot be decoded: "):
        opener.open_image(picture_part(encode(noise())), MediaLimits(max_decode_s=2.0))
    opener.close()


@pytest.mark.parametrize(
    "described,message",
    [
        ({"height": 2**31, "width": 2**31}, "pixels, the limit is"),
        ({"height": 9000, "width": 9000}, "pixels, the limit is"),
        ({"error": "refused", "message": "video 7: not yours"}, r"^image 3: video 7: not yours$"),
        ({"error": "refused"}, r"^image 3: None$"),
    ],
)
def test_sizes_are_checked_here_too(monkeypatch, described, message):
    opener = speaking(monkeypatch, reply(described))
    with pytest.raises(RequestError, match=message):
        opener.open_image(picture_part(encode(noise())), MediaLimits())
    opener.close()


@pytest.mark.parametrize("decoded", [{}, {"size_bytes": 0}, {"size_bytes": 7}, {"size_bytes": 10**9}])
def test_less_or_more_pixels_than_there_are(monkeypatch, decoded):
    opener = speaking(monkeypatch, reply({"height": 2, "width": 2}), reply(decoded))
    with pytest.raises(MediaFault):
        opener.open_image(picture_part(encode(noise())), MediaLimits()).decode()
    opener.close()


@pytest.mark.parametrize(
    "described,times",
    [
        ({"num_frames": 2**30}, b""),
        ({"fps": -1.0}, b""),
        ({"fps": float("nan")}, b""),
        ({"fps": "2"}, b""),
        ({"fps": 10**400}, b""),
        ({"fps": 1e-300}, b""),
        ({}, bytes(8)),
        ({}, np.array([0.0, np.nan, 1.0]).tobytes()),
        ({}, np.array([0.0, 2.0, 1.0]).tobytes()),
    ],
)
def test_nonsense_about_a_video(monkeypatch, described, times):
    known = {"num_frames": 3, "fps": 2.0, "height": 8, "width": 8, **described}
    opener = speaking(monkeypatch, reply({**known, "times": times}))
    with pytest.raises(RequestError, match=r"^video 1: "):
        opener.open_video(MediaPart("video", "video 1", b"anything"), MediaLimits())
    opener.close()


def test_shared_memory_that_is_cut_short_is_noticed(monkeypatch):
    script = f"""{SPEAK}
for reply in {[reply({"missing": []}), reply({"height": 500, "width": 500}), reply({"size_bytes": 750_000})]!r}:
    os.ftruncate(task["arguments"]["shared_fd"], 0)
    link.sendall(reply)
    link.recv(100_000)
"""
    monkeypatch.setattr(child, "BOOT", script)
    opener = IsolatedOpener()
    with pytest.raises(MediaFault, match="it cut the shared memory short"):
        opener.open_image(picture_part(encode(noise())), MediaLimits()).decode()
    opener.close()


def test_a_process_that_cannot_be_started_leaves_nothing_open(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransientError, match="no process that decodes media can be started"):
        IsolatedOpener().open_image(picture_part(encode(noise())), MediaLimits())
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_cannot_start_is_no_fault_of_the_request(monkeypatch):
    monkeypatch.setattr(child, "BOOT", "import sys; sys.exit(7)")
    opener = IsolatedOpener()
    with pytest.raises(TransientError, match=r"did not start: .* ended with status 7"):
        opener.open_image(picture_part(encode(noise())), MediaLimits())
    opener.close()


def test_missing_protection_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr(child, "BOOT", f"""{SPEAK}
link.sendall({reply({"missing": ["seccomp"]})!r})
link.recv(1)
""")  # fmt: skip
    for _ in range(2):
        process = DecoderProcess(2**30)
        process.wait_until_ready()
        process.end()
    assert caplog.messages == ["media are decoded with less protection: this system lacks seccomp"]


def test_real_memory_limits():
    """A picture within the limits of pixels, for a process that may use too little."""
    opener = IsolatedOpener(memory_bytes=2**25)
    data = encode(Image.new("RGB", (5000, 4000)))
    with pytest.raises(MediaFault, match="image 3: cannot be decoded: it needs more memory than decoding may use"):
        opener.open_image(picture_part(data), MediaLimits()).decode()
    opener.close()


@pytest.mark.alone  # 0.2 s are left for all but sleeping
def test_an_item_has_so_much_time_from_its_opening_on(taken_over):
    """What opening took is missing when it is decoded; once decoded, it may be decoded again."""
    code = """
        def decode():
            time.sleep(0.4)
            return m.np.zeros((2, 2, 3), m.np.uint8)
        time.sleep(0.4)
        found = m.OpenedImage("image 1", 2, 2, decode)
    """
    taken_over.open_image(picture_part(encode(noise())), MediaLimits())  # it has started
    picture = taken_over.open_image(attack(code), MediaLimits(max_decode_s=0.6))
    with pytest.raises(MediaFault, match=r"image 3: cannot be decoded: it took more than 0\.6 seconds"):
        picture.decode()
    picture = taken_over.open_image(attack(code), MediaLimits(max_decode_s=20))
    for _ in range(2):
        assert picture.decode().shape == (2, 2, 3)


def test_frames_that_nobody_wants_any_more(opener, clip):
    video = opener.open_video(MediaPart("video", "video 1", clip), MediaLimits())
    frames = video.frames(list(range(40)))
    first = next(frames)
    frames.close()
    assert np.array_equal(next(video.frames([0])), first)


def test_threads_do_not_wait_for_each_other(clip):
    opener = IsolatedOpener(num_kept=2)
    expected = np.asarray(noise())
    data, failures = encode(noise()), []

    def work():
        try:
            for _ in range(5):
                assert np.array_equal(opener.open_image(picture_part(data), MediaLimits()).decode(), expected)
                video = opener.open_video(MediaPart("video", "video 1", clip), MediaLimits())
                assert len(list(video.frames([0, 20, 39]))) == 3
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(processes(opener)) <= 2
    opener.close()


def test_closing_ends_what_is_under_way(taken_over):
    caught = []

    def work():
        try:
            taken_over.open_image(attack("time.sleep(100)"), MediaLimits())
        except RequestError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    while not any(process.is_ready for process in taken_over.pool._at_work.copy()):
        time.sleep(0.01)
    taken_over.close()
    thread.join()
    assert caught == ["image 3: cannot be decoded: the process that decoded it was ended"]


def test_processes_end_with_the_one_that_started_them():
    code = """
import io, os, signal
from PIL import Image
from tilewright.inputs.isolation.opener import IsolatedOpener
from tilewright.inputs.media import MediaLimits, MediaPart
opener, buffer = IsolatedOpener(), io.BytesIO()
Image.new("RGB", (8, 8)).save(buffer, "PNG")
opener.open_image(MediaPart("image", "image 1", buffer.getvalue()), MediaLimits())
print(opener.pool._idle[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    pid, waited_s = int(result.stdout), 0.0
    while is_running(pid) and waited_s < 10:
        time.sleep(0.05)
        waited_s += 0.05
    assert not is_running(pid)


def test_the_process_imports_no_torch():
    code = "import sys; import tilewright.inputs.isolation.main as m; m.import_all(); print(sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = set(json.loads(result.stdout.replace("'", '"')))
    wrong = {name for name in names if name.split(".")[0] in ("torch", "tokenizers", "jinja2", "transformers")}
    assert not wrong | {name for name in names if name.startswith(("tilewright.engine", "tilewright.models"))}
