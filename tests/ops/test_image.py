import numpy
import PIL
import pytest
import torch
from oracle import require
from PIL import Image

from tilewright.ops import media
from tilewright.ops.torch_backend import media as reference

FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
# Pillow 13 runs the vertical pass first where that saves work; we follow it, older ones never do.
TURNS_ORDER = int(PIL.__version__.split(".")[0]) >= 13
CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}

SIZES = [  # height, width -> height, width
    (1, 1, 1, 1),
    (1, 1, 7, 5),
    (1, 50, 3, 20),
    (50, 1, 20, 3),
    (2, 3, 2, 64),
    (5, 5, 5, 5),
    (33, 70, 33, 20),
    (70, 33, 20, 33),
    (17, 65, 31, 33),
    (37, 53, 64, 96),
    (64, 21, 65, 22),
    (100, 97, 31, 17),
    (131, 129, 70, 130),
    (200, 131, 67, 300),
    (480, 640, 28, 56),
    (300, 400, 3, 2),
    (3, 1000, 3, 1),
    (1000, 3, 1, 3),
]


def picture(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(0, 256, (*shape, 3), generator=generator, dtype=torch.uint8)


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """The picture as a window of a larger one: rows with a stride."""
    height, width, _ = tensor.shape
    frame = picture(height + 2, width + 3, seed=9)
    frame[1:-1, 2:-1] = tensor
    return frame[1:-1, 2:-1]


def pillow_resize(source: torch.Tensor, height: int, width: int, filter: str) -> torch.Tensor:
    resized = Image.fromarray(source.numpy()).resize((width, height), FILTERS[filter])
    return torch.from_numpy(numpy.array(resized))


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_resize_gives_pillows_bits(isa, size, filter):
    in_height, in_width, height, width = size
    source = picture(in_height, in_width)
    resized = media.resize(inside(source), height, width, filter)
    assert torch.equal(resized, reference.resize(source, height, width, filter))
    if TURNS_ORDER or in_height - height <= 2 * (in_width - width):
        assert torch.equal(resized, pillow_resize(source, height, width, filter))


def test_resize_clips_ringing(isa):
    """Bicubic overshoots at a hard edge: the levels beyond 0 and 255 must not wrap."""
    source = torch.zeros(40, 60, 3, dtype=torch.uint8)
    source[:, 20:40] = 255
    for height, width in [(80, 130), (17, 23)]:
        assert torch.equal(media.resize(source, height, width), reference.resize(source, height, width))


def test_resize_of_frames_writes_only_its_window(isa):
    frames = picture(3, 40, 50)
    buffer = torch.full((3, 34, 70, 3), 7, dtype=torch.uint8)
    window = buffer[:, 1:32, 4:67]
    assert media.resize(frames, 31, 63, out=window) is window
    assert torch.equal(window, reference.resize(frames, 31, 63))
    window.fill_(7)
    assert (buffer == 7).all()


@pytest.mark.parametrize(
    "patch,merge,size",
    [
        (16, 2, (50, 70, 64, 96)),
        (14, 2, (50, 70, 56, 84)),
        (16, 2, (64, 96, 64, 96)),
        (16, 1, (300, 200, 48, 32)),
        (14, 2, (33, 84, 56, 84)),
        (5, 3, (40, 40, 45, 30)),
        (1, 2, (9, 9, 4, 6)),
        (17, 1, (30, 30, 34, 51)),
        (32, 1, (50, 50, 64, 64)),
    ],
    ids=str,
)
def test_patches(isa, dtype, patch, merge, size):
    in_height, in_width, height, width = size
    source = picture(in_height, in_width)
    kwargs = {"patch_size": patch, "merge_size": merge, **CLIP}
    expected = reference.patches(source, height, width, dtype=dtype, **kwargs)
    # As the picture of a request: a slice of rows of a larger buffer, poisoned, the rows around it untouched.
    buffer = torch.full((expected.shape[0] + 2, expected.shape[1] + 3), float("nan"), dtype=dtype)
    out = buffer[1:-1, :-3]
    assert media.patches(inside(source), height, width, out=out, **kwargs) is out
    assert torch.equal(out, expected)
    out.fill_(float("nan"))
    assert buffer.isnan().all()


@pytest.mark.parametrize("temporal", [1, 2, 3])
def test_patches_of_a_video(isa, dtype, temporal):
    frames = picture(6, 40, 60)
    kwargs = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": temporal, "dtype": dtype, **CLIP}
    actual = media.patches(frames, 28, 56, **kwargs)
    assert actual.shape == (6 // temporal * 2 * 4, 3 * temporal * 14 * 14)
    assert torch.equal(actual, reference.patches(frames, 28, 56, **kwargs))


@pytest.mark.parametrize("mean,std", [(CLIP["mean"], CLIP["std"]), ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))])
def test_every_level_is_normalised_exactly(isa, dtype, mean, std):
    levels = torch.arange(256, dtype=torch.uint8).repeat_interleave(3).view(16, 16, 3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        kwargs = {"patch_size": 16, "merge_size": 1, "mean": mean, "std": std, "dtype": dtype}
        assert torch.equal(media.patches(levels, 16, 16, **kwargs), reference.patches(levels, 16, 16, **kwargs))
        mean, std = torch.rand(3, generator=generator).tolist(), (torch.rand(3, generator=generator) + 0.01).tolist()


@pytest.mark.parametrize("patch_size", [14, 16])
@pytest.mark.parametrize("size", [(480, 640), (333, 500), (700, 250), (60, 61)], ids=str)
def test_patches_are_those_of_transformers(isa, patch_size, size):
    transformers = require("transformers")
    processor = transformers.Qwen2VLImageProcessorPil(patch_size=patch_size, merge_size=2)
    source = picture(*size)
    features = processor(images=Image.fromarray(source.numpy()), return_tensors="pt")
    _, grid_height, grid_width = features["image_grid_thw"][0].tolist()
    expected = features["pixel_values"].view(-1, 3, 2, patch_size**2)
    actual = media.patches(
        source,
        grid_height * patch_size,
        grid_width * patch_size,
        patch_size=patch_size,
        merge_size=2,
        mean=processor.image_mean,
        std=processor.image_std,
        rescale=processor.rescale_factor,
        dtype=torch.float32,
    ).view(-1, 3, patch_size**2)
    if TURNS_ORDER:
        assert torch.equal(actual, expected[:, :, 0])
    torch.testing.assert_close(actual, expected[:, :, 0], rtol=0, atol=1 / 255 / min(processor.image_std) + 1e-6)


def test_same_bits_with_any_number_of_threads(isa):
    source, kernels = picture(301, 403), media.kernels
    expected = reference.patches(source, 96, 128, patch_size=16, merge_size=2, **CLIP)
    for count in (1, 2, 3, 7):
        kernels.set_num_threads(count)
        actual = media.patches(source, 96, 128, patch_size=16, merge_size=2, **CLIP)
        kernels.set_num_threads(0)
        assert torch.equal(actual, expected)


def test_errors_name_the_value():
    source = picture(8, 8)
    kwargs = {"patch_size": 4, "merge_size": 2, **CLIP}
    with pytest.raises(ValueError, match=r"patches: height is 12, expected a multiple of patch_size \* merge_size = 8"):
        media.patches(source, 12, 8, **kwargs)
    with pytest.raises(ValueError, match="frames is 3, expected a multiple of temporal_patch_size = 2"):
        media.patches(picture(3, 8, 8), 8, 8, temporal_patch_size=2, **kwargs)
    with pytest.raises(ValueError, match=r"out is float32 \[3, 48\], expected \[4, 48\]"):
        media.patches(source, 8, 8, out=torch.zeros(3, 48), **kwargs)
    with pytest.raises(ValueError, match="image is float32, expected uint8"):
        media.resize(source.float(), 8, 8)
    with pytest.raises(ValueError, match=r"image has shape \[8, 8, 4\], expected \[..., H, W, 3\]"):
        media.resize(torch.zeros(8, 8, 4, dtype=torch.uint8), 8, 8)
    with pytest.raises(ValueError, match=r"resizing \[8, 8\] to \[0, 8\]: every side must be 1 to 16777216"):
        media.resize(source, 0, 8)
    with pytest.raises(ValueError, match="filter is 'box', expected 'bicubic' or 'bilinear'"):
        media.resize(source, 8, 8, "box")
    with pytest.raises(ValueError, match="std has a zero"):
        media.patches(source, 8, 8, patch_size=4, merge_size=2, mean=(0, 0, 0), std=(1, 0, 1))
    with pytest.raises(ValueError, match="gap between pixels"):
        media.resize(picture(8, 16)[:, ::2], 8, 8)
