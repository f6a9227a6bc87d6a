"""10,000 damaged files: each is decoded or refused, in good time and in constant memory, and the decoder lives on."""

import functools
import io
import random
import resource
import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from clips import write_clip
from fuzzing import num_cases
from PIL import Image
from sounds import wav, write_sound

from tilewright.inputs.isolation.opener import IsolatedOpener, MediaFault
from tilewright.inputs.media import MediaLimits, MediaPart
from tilewright.types import RequestError

SLICE = 500
NUM_CASES = {
    kind: num_cases(few)
    for kind, few in {"png": 2000, "jpeg": 2000, "webp": 1500, "gif": 1500, "mp4": 1500, "wav": 1500}.items()
}
LIMITS = MediaLimits(max_pixels=2**18, max_duration_s=60, max_decode_s=10)
MAX_GROWTH_BYTES = 6 * 2**20
pytestmark = pytest.mark.fuzz


def picture(mode="RGB"):
    y, x = np.mgrid[0:24, 0:36]
    levels = np.stack([x * 7 % 256, y * 9 % 256, (x * y) % 256], axis=-1).astype(np.uint8)
    return Image.fromarray(levels).convert(mode)


def encoded(image, format, **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def exif():
    tags = Image.Exif()
    tags[0x0112] = 6
    tags.get_ifd(0x8769)[0x9286] = b"ASCII\0\0\0hello"
    return tags.tobytes()


@functools.cache
def seeds(kind):
    """Whole files of a kind, with as many of its features as fit in little."""
    frames = [picture().rotate(90 * turn) for turn in range(1, 4)]
    clear = picture("RGBA")
    clear.putalpha(Image.fromarray(np.asarray(picture())[:, :, 0]))
    sound = np.sin(np.arange(4000) / 9)[:, None] * [1.0, 0.5]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        match kind:
            case "png":
                wide = Image.fromarray(np.arange(24 * 36).reshape(24, 36).astype(np.uint16) * 75)
                return [
                    encoded(picture(), "PNG", exif=exif(), icc_profile=bytes(200)),
                    encoded(clear, "PNG", compress_level=0),
                    encoded(picture().quantize(8), "PNG", transparency=3),
                    encoded(wide, "PNG"),
                    encoded(picture("1"), "PNG"),
                    encoded(picture(), "PNG", save_all=True, append_images=frames, duration=50),
                ]
            case "jpeg":
                return [
                    encoded(picture(), "JPEG", exif=exif(), icc_profile=bytes(200), comment=b"hello"),
                    encoded(picture(), "JPEG", progressive=True, quality=95),
                    encoded(picture("CMYK"), "JPEG", subsampling=0),
                    encoded(picture("L"), "JPEG", restart_marker_blocks=2),
                    encoded(picture(), "MPO", save_all=True, append_images=frames[:1]),
                ]
            case "webp":
                return [
                    encoded(picture(), "WEBP", exif=exif()),
                    encoded(picture(), "WEBP", lossless=True),
                    encoded(clear, "WEBP", quality=60),
                    encoded(picture(), "WEBP", save_all=True, append_images=frames, duration=50),
                ]
            case "gif":
                return [
                    encoded(picture(), "GIF"),
                    encoded(
                        clear, "GIF", save_all=True, append_images=frames, duration=50, disposal=2, comment=b"hello"
                    ),
                    encoded(picture().quantize(4), "GIF", transparency=1, interlace=1),
                ]
            case "mp4":
                return [
                    write_clip(folder / "a.mp4", 8, options={"bf": "2", "g": "4"}),
                    write_clip(folder / "b.mp4", 8, codec="libx264", options={"g": "4", "preset": "ultrafast"}),
                    write_clip(folder / "c.mp4", 8, container_options={"movflags": "frag_keyframe+empty_moov"}),
                    write_clip(folder / "d.mp4", 6, times_ms=[0, 40, 80, 900, 940, 2000]),
                ]
            case "wav":
                return [
                    *(wav(sound[:1000], 8000, width) for width in (1, 2, 3, 4)),
                    wav(sound[:1000, :1], 44100),
                    write_sound(folder / "f.flac", sound, 8000, "flac"),
                    write_sound(folder / "g.mp3", sound, 16000, "libmp3lame"),
                    write_sound(folder / "h.m4a", sound, 8000, "aac"),
                ]
    raise ValueError(kind)


EXTREMES = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0xFFFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]


def flip_bits(data, chance):
    for _ in range(chance.choice([1, 1, 2, 4, 16])):
        data[_place(data, chance)] ^= 1 << chance.randrange(8)


def set_bytes(data, chance):
    for _ in range(chance.choice([1, 2, 4])):
        data[_place(data, chance)] = chance.choice([0, 1, 0x7F, 0x80, 0xFE, 0xFF, chance.randrange(256)])


def set_number(data, chance):
    """A length, a size or an offset, somewhere, becomes an extreme one."""
    form = chance.choice(["<H", ">H", "<I", ">I", ">I", "<I", ">Q"])
    size = struct.calcsize(form)
    if len(data) > size:
        at = min(_place(data, chance), len(data) - size)
        data[at : at + size] = struct.pack(form, chance.choice(EXTREMES) & (256**size - 1))


def lie_about_a_chunk(data, chance):
    """The length before a chunk's name, which is four letters."""
    places = [at for at in range(4, len(data) - 4) if data[at : at + 4].isalpha() and data[at : at + 4].isascii()]
    if places:
        at = chance.choice(places)
        near = int.from_bytes(data[at - 4 : at], "big") + chance.choice([-8, -1, 1, 8, 100])
        value = chance.choice([near & 0xFFFFFFFF, *EXTREMES])
        form, at = chance.choice([(">I", at - 4), ("<I", at + 4)])
        data[at : at + 4] = struct.pack(form, value)


def cut(data, chance):
    del data[chance.randrange(len(data)) :]


def cut_out(data, chance):
    at = _place(data, chance)
    del data[at : at + chance.choice([1, 2, 4, 16, 100])]


def repeat(data, chance):
    at = _place(data, chance)
    block = data[at : at + chance.choice([1, 4, 16, 100])]
    data[at:at] = block * chance.choice([1, 2, 50])


def append_garbage(data, chance):
    data += chance.randbytes(chance.choice([1, 10, 1000]))


def declare_a_huge_size(data, chance):
    """Where each kind keeps its width and height, or its rate and channels."""
    wide, high = chance.choice([1, 511, 513, 16383, 30000, 65535]), chance.choice([1, 511, 513, 16383, 30000, 65535])
    if data[:4] == b"\x89PNG":
        data[16:24] = struct.pack(">II", chance.choice([wide, 2**31 - 1]), high)
    elif data[:3] == b"GIF":
        data[6:10] = struct.pack("<HH", wide, high)
    elif data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        data[22:28] = struct.pack(
            "<HI", chance.choice([0, 1, 3, 255, 65535]), chance.choice([0, 1, 999, 768_001, 2**31])
        )
    elif data[:4] == b"RIFF" and (at := data.find(b"VP8X")) > 0:
        data[at + 12 : at + 18] = wide.to_bytes(3, "little") + high.to_bytes(3, "little")
    elif data[:2] == b"\xff\xd8":
        for marker in (b"\xff\xc0", b"\xff\xc2"):
            if (at := data.find(marker)) > 0:
                data[at + 5 : at + 9] = struct.pack(">HH", high, wide)
    elif (at := data.find(b"tkhd")) > 0:
        data[at + 80 : at + 88] = struct.pack(">II", wide << 16, high << 16)
        for codec in (b"mp4v", b"avc1"):
            if (at := data.find(codec)) > 0:
                data[at + 28 : at + 32] = struct.pack(">HH", wide, high)


def _place(data, chance):
    """Half of the places lie near the beginning, where the headers are."""
    return chance.randrange(len(data) if chance.random() < 0.5 else min(len(data), 200))


DAMAGES = [flip_bits, flip_bits, set_bytes, set_number, set_number, lie_about_a_chunk, lie_about_a_chunk, cut, cut_out,
           repeat, append_garbage, declare_a_huge_size]  # fmt: skip


def damaged(kind, index):
    """(a file, a way to open it that is not its own, if any): the same ones for the same kind and index."""
    chance = random.Random(f"{kind} {index}")
    data = bytearray(chance.choice(seeds(kind)))
    if chance.random() < 0.1:  # the beginning of one, the end of another, of any kind
        other = chance.choice(seeds(chance.choice([kind, *NUM_CASES])))
        data[chance.randrange(len(data)) :] = other[chance.randrange(len(other)) :]
    if chance.random() < 0.05:  # the magic of one, the rest of another
        data[:12] = chance.choice(seeds(chance.choice(list(NUM_CASES))))[:12]
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        if len(data) > 4:
            chance.choice(DAMAGES)(data, chance)
    if kind == "png" and chance.random() < 0.8:
        mend_checksums(data)
    way = chance.choice(["image", "video", "audio"]) if chance.random() < 0.15 else None
    return bytes(data), way


def mend_checksums(data):
    """Damage behind a wrong checksum would not be looked at."""
    at = 8
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        if end + 4 > len(data):
            return
        data[end : end + 4] = zlib.crc32(data[at + 4 : end]).to_bytes(4, "big")
        at = end + 4


def decode(opener, kind, data, way=None):
    """Opens the file as what it is, or in another way, and takes all of it."""
    way = way or {"mp4": "video", "wav": "audio"}.get(kind, "image")
    part = MediaPart(way, f"{way} 1", data or b"\0")
    if way == "image":
        picture = opener.open_image(part, LIMITS)
        assert picture.decode().shape == (picture.height, picture.width, 3)
    elif way == "video":
        video = opener.open_video(part, LIMITS)
        indices = video.sample(sorted({0, video.num_frames // 2, video.num_frames - 1})).indices
        for frame in video.frames(indices):
            assert frame.shape == (video.height, video.width, 3)
    else:
        sound = opener.open_sound(part, LIMITS, 16000).decode()
        assert sound.ndim == 1 and np.isfinite(sound).all()


@pytest.fixture(scope="module")
def opener():
    """One process for all, which has seen what is as large as the limits allow: what it grows by later on, it leaks."""
    opener = IsolatedOpener(max_items_per_process=10**6, num_kept=1)
    side = int(LIMITS.max_pixels**0.5)
    for format in ("PNG", "JPEG", "WEBP", "GIF"):
        decode(
            opener, "png", encoded(picture("RGBA" if format in ("PNG", "WEBP") else "RGB").resize((side, side)), format)
        )
    decode(opener, "gif", encoded(picture().resize((side, side)), "GIF"), way="video")
    decode(opener, "wav", wav(np.zeros((int(LIMITS.max_duration_s) * 8000, 2)), 8000))
    yield opener
    opener.close()


def the_process(opener):
    (process,) = opener.pool._idle
    return process.pid


def resident_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("kind,first", [(kind, at) for kind, num in NUM_CASES.items() for at in range(0, num, SLICE)])
def test_damaged_files(opener, kind, first):
    pid, after_a_quarter, outcomes = the_process(opener), 0, {"decoded": 0, "refused": 0}
    for index in range(first, first + SLICE):
        data, way = damaged(kind, index)
        try:
            decode(opener, kind, data, way)
            outcomes["decoded"] += 1
        except MediaFault as fault:
            pytest.fail(f"damaged({kind!r}, {index}) brought the decoder down: {fault}")
        except RequestError as error:
            assert str(error).partition(":")[0] in ("image 1", "video 1", "audio 1")
            outcomes["refused"] += 1
        if index == first + SLICE // 4:
            after_a_quarter = resident_bytes(pid)
    assert the_process(opener) == pid, "one process for all"
    assert resident_bytes(pid) - after_a_quarter < MAX_GROWTH_BYTES
    assert min(outcomes.values()) > SLICE // 20, outcomes


def test_whole_files_are_decoded(opener):
    for kind in NUM_CASES:
        for data in seeds(kind):
            decode(opener, kind, data)
