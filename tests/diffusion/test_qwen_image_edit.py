"""Whole runs of Qwen-Image-Edit against diffusers, from the same latents, on tiny random checkpoints."""

import functools

import numpy as np
import pytest
import tiny_qwen_image
import torch
from oracle import require
from PIL import Image
from pipeline_ranks import run_on_ranks

from tilewright.diffusion.diffusion import Diffusion
from tilewright.diffusion.params import Limits, size_of_area
from tilewright.diffusion.pipelines import qwen_image_edit
from tilewright.types import RequestError

PROMPT, NEGATIVE = "a {red} cat", "blurry, out of focus"
EDIT, PLUS = "QwenImageEditPipeline", "QwenImageEditPlusPipeline"
STILL = "Qwen-Image-Edit-2511"  # the same as PLUS, with images to edit at timestep 0
MODULES = {EDIT: "pipeline_qwenimage_edit", PLUS: "pipeline_qwenimage_edit_plus"}
SIZE = {"width": 64, "height": 48}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """diffusers' pipeline and its folder, by class."""

    @functools.cache
    def checkpoint(class_name):
        folder = tmp_path_factory.mktemp(class_name)
        options = {"zero_cond_t": True} if class_name == STILL else {}
        return tiny_qwen_image.save_edit(folder, PLUS if options else class_name, **options), folder

    return checkpoint


@pytest.fixture(autouse=True)
def small_areas(monkeypatch):
    """A million pixels would take minutes: 96 x 96 are read by the VAE, and 64 x 64 seen of several images."""
    monkeypatch.setattr(qwen_image_edit, "AREA", 96 * 96)
    monkeypatch.setattr(qwen_image_edit, "SEEN_AREA", 64 * 64)
    smaller = {1024 * 1024: 96 * 96, 384 * 384: 64 * 64}
    for name in MODULES.values():
        module = require(f"diffusers.pipelines.qwenimage.{name}")
        exact = module.calculate_dimensions
        monkeypatch.setattr(
            module, "calculate_dimensions", lambda area, ratio, exact=exact: exact(smaller[area], ratio)
        )


def image(width, height, seed=0):
    """Smooth, as photographs are: noise would be averaged away."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def latents_of(n=1):
    return torch.randn(n, 12, 16, generator=torch.Generator().manual_seed(3))


@functools.cache
def opened(folder):
    return Diffusion(folder, dtype="float32", pack_cache=False)


def ours(folder, **settings):
    settings = {"num_steps": 4, "guidance": 4.0, "output": "latents", **SIZE, **settings}
    return opened(folder).generate(PROMPT, **settings)


@pytest.mark.parametrize("negative", [None, NEGATIVE], ids=["plain", "guided"])
@pytest.mark.parametrize(
    ("class_name", "given"),
    [
        (EDIT, [(100, 100)]),
        (EDIT, [(200, 90)]),
        (PLUS, [(100, 100)]),
        (PLUS, [(120, 70), (70, 140)]),
        (STILL, [(120, 70), (70, 140)]),
    ],
    ids=["edit", "edit wide", "plus", "plus two", "still"],
)
def test_latents_are_those_of_diffusers(checkpoints, class_name, given, negative):
    pipeline, folder = checkpoints(class_name)
    images = [image(*size, seed) for seed, size in enumerate(given)]
    expected = pipeline(
        image=images[0] if class_name == EDIT else images,
        prompt=PROMPT,
        negative_prompt=negative,
        true_cfg_scale=4.0,
        latents=latents_of(),
        num_inference_steps=4,
        output_type="latent",
        **SIZE,
    ).images
    found = ours(folder, image=images, negative_prompt=negative, latents=latents_of()).latents
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    other = [image(*size, 9) for size in given]
    assert (ours(folder, image=other, latents=latents_of()).latents - expected).abs().max() > 1e-2


def test_images_are_those_of_diffusers(checkpoints):
    """Two of them, from one image."""
    pipeline, folder = checkpoints(EDIT)
    edited, latents = image(100, 80), latents_of(2)
    expected = pipeline(
        image=edited,
        prompt=PROMPT,
        negative_prompt=NEGATIVE,
        num_images_per_prompt=2,
        latents=latents,
        num_inference_steps=3,
        output_type="np",
        **SIZE,
    ).images
    settings = {"image": edited, "negative_prompt": NEGATIVE, "n": 2, "num_steps": 3, "latents": latents}
    found = np.stack(ours(folder, output="array", **settings).images)
    assert np.abs(found[:, 0] / 255 - expected).max() <= 0.51 / 255 + 1e-3


def test_two_ranks_make_what_one_does(checkpoints):
    _, folder = checkpoints(PLUS)
    options = {"image": [image(90, 90), image(70, 99, 1)], "num_steps": 2, "seed": 2, **SIZE}
    (alone,) = run_on_ranks(1, folder, PROMPT, **options)
    for result in run_on_ranks(2, folder, PROMPT, **options):
        torch.testing.assert_close(result.latents, alone.latents, rtol=1e-4, atol=1e-4)


def test_an_edited_image_has_the_shape_of_the_last():
    limits = Limits(16, 1024, 1024, 4, 4.0, takes_image=True, needs_image=True, image_area=1 << 20)

    def size(**settings):
        params = limits.params(PROMPT, **settings)
        return params.width, params.height

    module = require("diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus")
    for width, height in ((640, 480), (100, 100), (333, 777)):
        assert size_of_area(96 * 96, (width, height)) == module.calculate_dimensions(1 << 20, width / height)
    assert size(image=[image(64, 64), image(640, 480)]) == (1184, 896)
    assert size(image=image(640, 480), width=64) == (64, 896)
    assert size(image=b"not opened yet") == (1024, 1024)


@pytest.mark.parametrize(
    ("class_name", "settings", "message"),
    [
        (EDIT, {}, "this model needs an image to start from"),
        (EDIT, {"image": [image(64, 64)] * 2}, "image is a list of 2, expected at most 1"),
        (PLUS, {"image": [image(64, 64)] * 4}, "image is a list of 4, expected at most 3"),
        (PLUS, {"image": image(64, 30)}, "image is 64 x 30, expected sides of at least 64 pixels"),
    ],
)
def test_requests_that_do_not_fit(checkpoints, class_name, settings, message):
    with pytest.raises(RequestError, match=message):
        ours(checkpoints(class_name)[1], **settings)


def test_a_prompt_with_the_token_of_an_image(checkpoints):
    with (
        Diffusion(checkpoints(EDIT)[1], dtype="float32", pack_cache=False) as diffusion,
        pytest.raises(RequestError, match="the token of an image, expected text"),
    ):
        diffusion.generate("a <|image_pad|> cat", image=image(64, 64), num_steps=2, **SIZE)
