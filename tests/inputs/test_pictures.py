import io
import zlib

import numpy as np
import pytest
import torch
from clips import bitmap_header, damages
from oracle import require
from PIL import Image, ImageOps

from tilewright.inputs.image import open_image
from tilewright.inputs.media import MediaLimits, MediaPart
from tilewright.types import RequestError


def level_picture(height: int = 24, width: int = 36) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([x * 7 % 256, y * 9 % 256, (x + y) * 5 % 256], axis=-1).astype(np.uint8)


def encode(image: Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def opened(source, **limits):
    return open_image(MediaPart("image", "image 2", source), MediaLimits(**limits))


def decoded(source) -> np.ndarray:
    picture = opened(source)
    pixels = picture.decode()
    assert pixels.dtype == np.uint8 and pixels.shape == (picture.height, picture.width, 3)
    assert pixels.flags.c_contiguous and pixels.flags.writeable
    return pixels


@pytest.mark.parametrize("format", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_formats(format, tmp_path):
    source = Image.fromarray(level_picture())
    options = {"lossless": True} if format == "WEBP" else {}
    data = encode(source, format, **options)
    expected = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(decoded(data), expected)
    if format not in ("JPEG", "GIF"):
        assert np.array_equal(expected, level_picture())
    path = tmp_path / "picture"
    path.write_bytes(data)
    for same in (path, str(path), bytearray(data), memoryview(data)):
        assert np.array_equal(decoded(same), expected)
        assert opened(same).digest == opened(data).digest


def test_modes_are_converted_as_transformers_does():
    """Transparency lies over white; the rest is Pillow's plain conversion."""
    transforms = require("transformers.image_transforms")
    rgb = Image.fromarray(level_picture())
    rgba = rgb.copy()
    rgba.putalpha(Image.fromarray(level_picture()[:, :, 0]))
    palette = rgb.quantize(16)
    transparent = palette.copy()
    transparent.info["transparency"] = 3
    for image in [
        rgb,
        rgba,
        palette,
        transparent,
        rgb.convert("L"),
        rgb.convert("1"),
        rgba.convert("LA"),
        rgb.convert("CMYK"),
    ]:
        expected = transforms.convert_to_rgb(image, return_numpy=True)
        assert np.array_equal(decoded(image), expected), image.mode
    for image, format in [
        (rgba, "PNG"),
        (rgba, "WEBP"),
        (transparent, "PNG"),
        (transparent, "GIF"),
        (rgb.convert("1"), "PNG"),
    ]:
        data = encode(image, format)
        expected = transforms.convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True)
        assert np.array_equal(decoded(data), expected), (image.mode, format)


def test_cmyk_jpeg():
    data = encode(Image.fromarray(level_picture()).convert("CMYK"), "JPEG", quality=95)
    difference = decoded(data).astype(int) - level_picture()
    assert np.abs(difference).mean() < 12, "colours must not be inverted"


def test_16_bits_keep_their_upper_8():
    levels = (np.arange(24 * 36).reshape(24, 36) * 75).astype(np.uint16)
    data = encode(Image.fromarray(levels), "PNG")
    assert Image.open(io.BytesIO(data)).mode.startswith("I")
    expected = np.repeat((levels >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    assert np.array_equal(decoded(data), expected)
    assert np.array_equal(decoded(Image.fromarray(levels)), expected)
    small = Image.fromarray((levels % 256).astype(np.int32))  # 32-bit, with 8-bit levels in it
    assert np.array_equal(decoded(small)[:, :, 0], levels % 256)


def test_animations_give_their_first_frame():
    frames = [Image.new("RGB", (20, 10), color) for color in ("red", "blue")]
    for format in ("GIF", "WEBP", "PNG"):
        data = encode(frames[0], format, save_all=True, append_images=frames[1:])
        pixels = decoded(data).reshape(-1, 3).mean(axis=0)
        assert pixels[0] > 250 and pixels[2] < 5, format


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_exif_rotation(format, orientation):
    image = Image.fromarray(level_picture())
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(image, format, exif=exif.tobytes())
    expected = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert np.array_equal(decoded(data), expected)
    assert (expected.shape[0] == 36) == (orientation > 4)
    assert np.array_equal(decoded(Image.open(io.BytesIO(data))), expected)


def test_exif_behind_the_pixels_of_a_png():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(Image.fromarray(level_picture()), "PNG", exif=exif.tobytes())
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4], "big")
    chunk, rest = data[start:end], data[:start] + data[end:]
    moved = rest[:-12] + chunk + rest[-12:]
    assert opened(moved).height == 36
    assert np.array_equal(decoded(moved), np.rot90(level_picture(), -1))


def test_arrays_and_tensors():
    pixels = level_picture()
    assert np.array_equal(decoded(pixels), pixels)
    assert np.array_equal(decoded(pixels.transpose(2, 0, 1)), pixels)
    assert np.array_equal(decoded(torch.from_numpy(pixels).permute(2, 0, 1)), pixels)
    assert np.array_equal(decoded(pixels.astype(np.float32) / 255), pixels)
    assert np.array_equal(decoded(torch.from_numpy(pixels / 255.0)), pixels)
    assert np.array_equal(decoded(pixels[:, :, 0]), np.repeat(pixels[:, :, :1], 3, axis=2))
    assert np.array_equal(decoded(pixels[:, :, :1]), np.repeat(pixels[:, :, :1], 3, axis=2))
    clear = np.concatenate([pixels, np.zeros_like(pixels[:, :, :1])], axis=2)
    assert (decoded(clear) == 255).all()
    assert (decoded(torch.ones(8, 8, 3, dtype=torch.bfloat16)) == 255).all()


def test_the_digest_is_of_content():
    pixels = level_picture()
    assert opened(pixels).digest == opened(Image.fromarray(pixels)).digest
    other = pixels.copy()
    other[3, 4, 1] ^= 1
    assert opened(other).digest != opened(pixels).digest
    assert opened(pixels.reshape(36, 24, 3)).digest != opened(pixels).digest


@pytest.mark.parametrize(
    "source,message",
    [
        (b"", "image 2: it is empty"),
        (b"hello, this is no picture", "image 2: not an image that can be read, expected PNG, JPEG, WEBP, GIF, BMP"),
        ("no/such/file.png", "image 2: no/such/file.png cannot be read: No such file"),
        ("nul\0byte", "image 2: .* cannot be read"),
        (np.zeros((6, 5, 7), np.uint8), r"image 2: its shape is \[6, 5, 7\], expected 1, 3 or 4 channels"),
        (np.zeros((0, 5, 3), np.uint8), r"image 2: its shape is \[0, 5, 3\]"),
        (np.zeros(5, np.uint8), r"image 2: its shape is \[5\]"),
        (np.full((4, 4, 3), 255.0), "image 2: its values are 255 to 255, expected floats of 0 to 1 or uint8"),
        (np.full((4, 4, 3), np.nan), "image 2: its values are nan to nan"),
        (np.zeros((4, 4, 3), np.int64), "image 2: its type is int64"),
        (7, "image 2: it is a int, expected bytes, a path, a PIL image or an array"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_picture(source, message):
    with pytest.raises(RequestError, match=message):
        opened(source)


@pytest.mark.parametrize("format", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_truncated_files_are_named(format):
    """Cut anywhere, a file is refused by name, or (cut behind its last pixel) gives the whole picture."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    data = encode(Image.fromarray(noise), format)
    whole = decoded(data)
    for cut in [1, 10, 30, len(data) // 4, len(data) // 2, len(data) * 3 // 4, len(data) - 40, len(data) - 1]:
        try:
            pixels = decoded(data[:cut])
        except RequestError as error:
            assert str(error).startswith("image 2: ")
        else:
            assert cut > len(data) * 0.9 and np.array_equal(pixels, whole), f"{format} cut at {cut} of {len(data)}"


def test_damaged_files_are_named():
    data = bytearray(encode(Image.fromarray(level_picture()), "PNG"))
    position = data.index(b"IDAT") + 20
    data[position : position + 8] = bytes(8)
    with pytest.raises(RequestError, match="image 2: cannot be decoded"):
        decoded(bytes(data))


@pytest.mark.parametrize("format", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_any_damage_is_a_clear_error_or_none(format):
    data = encode(Image.fromarray(level_picture()), format)
    num_refused = 0
    for damaged in damages(data, 200):
        try:
            picture = opened(damaged, max_pixels=2**20)
            assert picture.decode().shape == (picture.height, picture.width, 3)
        except RequestError as error:
            assert str(error).startswith("image 2: ")
            num_refused += 1
    assert num_refused > 0


def test_limits():
    data = encode(Image.new("RGB", (300, 200)), "PNG")
    with pytest.raises(RequestError, match="image 2: 300 x 200 = 60000 pixels, the limit is 50000"):
        opened(data, max_pixels=50_000)
    with pytest.raises(RequestError, match="300 x 200 = 60000 pixels"):
        opened(np.zeros((200, 300, 3), np.uint8), max_pixels=50_000)
    with pytest.raises(RequestError, match=f"image 2: {len(data)} bytes or more, the limit is 100"):
        opened(data, max_bytes=100)


@pytest.mark.filterwarnings("ignore:Image size")
def test_a_size_that_pillow_refuses_too_has_our_words():
    """The header of a BMP, which is all that is read of it."""
    for side, message in ((12_000, "144000000 pixels"), (20_000, "more than 178956970 pixels")):
        with pytest.raises(RequestError, match=rf"image 2: .*{message}, the limit is 67108864 \(--max-pixels\)$"):
            opened(bitmap_header(side))
    with pytest.raises(RequestError, match=r"the limit is 178956970 \(MAX_IMAGE_PIXELS of PIL\)$"):
        opened(bitmap_header(20_000), max_pixels=10**9)


def test_a_file_of_too_many_bytes_is_not_read_whole(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse: no disk is used, and reading it all would fail
    with pytest.raises(RequestError, match=f"image 2: .* it has {2**40} bytes, the limit is 1000"):
        opened(path, max_bytes=1000)


def test_paths_can_be_refused(tmp_path):
    with pytest.raises(RequestError, match="image 2: files are not read here"):
        opened(tmp_path / "x.png", allow_paths=False)


def test_a_bomb_is_refused_by_its_header():
    """A PNG that says 60,000 x 60,000, with almost no data: refused before a pixel is decoded."""
    data = bytearray(encode(Image.new("L", (8, 8)), "PNG"))
    data[16:24] = (60_000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    with pytest.raises(RequestError, match=r"image 2: .*more than 178956970 pixels, the limit is 67108864"):
        opened(bytes(data))
