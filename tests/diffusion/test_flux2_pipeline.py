"""FLUX.2 klein from prompt to image against diffusers, from the same latents."""

import functools
import logging

import numpy as np
import pytest
import tiny_flux
import torch
from components import relative, rms
from oracle import require
from PIL import Image
from pipeline_ranks import run_on_ranks
from tiny_flux import HEIGHT, NUM_STEPS, PROMPT, WIDTH, opened, ours
from torch_bf16 import quick_products

from tilewright.diffusion.pipelines import flux2
from tilewright.types import RequestError


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    """diffusers' pipeline and its folder, by kind."""

    @functools.cache
    def pipeline(kind):
        folder = tmp_path_factory.mktemp(kind)
        return tiny_flux.klein_pipeline(folder, is_distilled=kind == "distilled"), folder

    return pipeline


def theirs(pipeline, **settings):
    """Pixels [n, H, W, 3] in [0, 1]."""
    settings = {"width": WIDTH, "height": HEIGHT, "num_inference_steps": NUM_STEPS, **settings}
    return pipeline(prompt=PROMPT, output_type="np", **settings).images


def denoised(pipeline, **settings):
    """Latents before the VAE's statistics: what our pipeline gives."""
    kept = {}

    def keep(pipeline, step, timestep, tensors):
        kept.update(tensors)
        return {}

    theirs(pipeline, callback_on_step_end=keep, **settings)
    rows, columns = HEIGHT // 4, WIDTH // 4
    return kept["latents"].float().transpose(1, 2).unflatten(2, (rows, columns))


def given(n=1):
    return torch.randn(n, 16, HEIGHT // 4, WIDTH // 4, generator=torch.Generator().manual_seed(5))


def image(width, height, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("kind", ["distilled", "base"])
def test_latents_and_images_are_those_of_diffusers(kind, pipelines):
    pipeline, folder = pipelines(kind)
    guidance = {"distilled": 1.0, "base": 2.5}[kind]
    result = ours(folder, latents=given(2), n=2, guidance=guidance)
    options = {"guidance_scale": guidance, "num_images_per_prompt": 2}
    assert relative(result.latents, denoised(pipeline, latents=given(2), **options)) < 1e-3
    images = np.stack([frames[0] for frames in result.images])
    assert images.shape == (2, HEIGHT, WIDTH, 3)
    assert np.abs(images / 255 - theirs(pipeline, latents=given(2), **options)).max() < 1e-3 + 0.5 / 255


def test_noise_is_that_of_diffusers_for_a_seed(pipelines):
    pipeline, folder = pipelines("distilled")
    expected = denoised(pipeline, generator=torch.Generator().manual_seed(7))
    assert relative(ours(folder, seed=7).latents, expected) < 1e-3


def test_bf16_is_as_close_to_the_truth_as_diffusers(pipelines):
    pipeline, folder = pipelines("distilled")
    truth = denoised(pipeline, latents=given())
    half = type(pipeline).from_pretrained(folder, dtype=torch.bfloat16)
    half.set_progress_bar_config(disable=True)
    with quick_products():
        expected = denoised(half, latents=given())
    assert rms(ours(folder, "bfloat16", latents=given()).latents - truth) <= 1.25 * rms(expected - truth)


@pytest.mark.parametrize("kind", ["distilled", "base"])
def test_images_are_edited(kind, pipelines, monkeypatch):
    """Two, one larger than is read, both with margins that are cut."""
    pipeline, folder = pipelines(kind)
    images = [image(70, 67, 1), image(90, 130, 2)]
    monkeypatch.setattr(flux2, "MAX_REFERENCE_PIXELS", 8100)
    # diffusers makes images smaller above a million pixels: here it is given one that is.
    processor = require("diffusers.pipelines.flux2.image_processor").Flux2ImageProcessor
    fitting = [images[0], processor._resize_to_target_area(images[1], 8100)]
    expected = denoised(pipeline, latents=given(), image=fitting, guidance_scale=2.0)
    result = ours(folder, latents=given(), image=images, guidance=2.0)
    assert relative(result.latents, expected) < 1e-3
    alone = ours(folder, latents=given(), image=images[0], guidance=2.0)
    assert relative(alone.latents, expected) > 1e-2


def test_an_edited_image_has_the_size_of_the_first(pipelines):
    limits = opened(pipelines("distilled")[1]).limits
    images = [image(90, 131, 1), image(200, 100, 2)]

    def size(**settings):
        params = limits.params(PROMPT, **settings)
        return params.width, params.height

    assert size(image=images) == (88, 128)
    assert size(image=images[0], width=64) == (64, 128)
    assert size(image=Image.new("RGB", (3000, 1000))) == (1772, 588)  # of a million pixels, as diffusers makes it
    assert size() == (1024, 1024)


def test_two_ranks_give_what_one_does(pipelines):
    _, folder = pipelines("base")
    settings = {"width": WIDTH, "height": HEIGHT, "num_steps": 2, "latents": given(), "output": "latents"}
    alone = ours(folder, **settings).latents
    for result in run_on_ranks(2, folder, PROMPT, **settings):
        assert relative(result.latents, alone) < 1e-4


def test_reused_steps_are_close(pipelines):
    _, folder = pipelines("distilled")
    exact = ours(folder, latents=given()).latents
    assert torch.equal(ours(folder, latents=given(), step_cache=1e-9).latents, exact)
    assert 1e-6 < relative(ours(folder, latents=given(), step_cache=1.0).latents, exact) < 0.5


def test_the_shift_is_that_of_diffusers():
    module = require("diffusers.pipelines.flux2.pipeline_flux2_klein")
    for num_tokens in (24, 1024, 4096, 4300, 4301, 16384):
        for num_steps in (1, 4, 50, 200):
            expected = module.compute_empirical_mu(num_tokens, num_steps)
            assert flux2.empirical_shift(num_tokens, num_steps) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image": "cat.png"}, "image is a str, expected a PIL image"),
        ({"image": [Image.new("RGB", (64, 64))] * 11}, "image is a list of 11, expected at most 10"),
        ({"image": Image.new("RGB", (63, 200))}, "image is 63 x 200, expected sides of at least 64"),
        ({"image": Image.new("RGB", (64, 520))}, "image is 64 x 520, expected sides of at most 8 to 1"),
        ({"negative_prompt": "dogs"}, "takes no negative_prompt"),
        ({"height": 30}, "height is 30, expected a multiple of 4"),
    ],
)
def test_requests_that_do_not_fit(settings, message, pipelines):
    _, folder = pipelines("distilled")
    with pytest.raises(RequestError, match=message):
        ours(folder, **settings)


def test_a_prompt_longer_than_is_read(pipelines):
    _, folder = pipelines("distilled")
    with pytest.raises(RequestError, match=r"\d+ tokens .* 512"):
        opened(folder).generate("x" * 600, width=WIDTH, height=HEIGHT)


def test_guidance_that_is_not_read_is_told(pipelines, caplog):
    _, folder = pipelines("distilled")
    with caplog.at_level(logging.WARNING):
        ours(folder, guidance=3.0, num_steps=1, output="latents")
    assert "guidance 3 is ignored" in caplog.text
