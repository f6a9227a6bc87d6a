"""FLUX.1 from prompt to image against diffusers, from the same latents."""

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

from tilewright.diffusion.pipelines import flux
from tilewright.types import RequestError

NUM_TOKENS = WIDTH * HEIGHT // 16


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    """diffusers' pipeline and its folder, by kind."""

    @functools.cache
    def pipeline(kind):
        folder = tmp_path_factory.mktemp(kind)
        class_name = "FluxKontextPipeline" if kind == "kontext" else "FluxPipeline"
        return tiny_flux.flux_pipeline(folder, "dev" if kind == "kontext" else kind, class_name), folder

    return pipeline


def theirs(pipeline, output_type, **settings):
    settings = {"width": WIDTH, "height": HEIGHT, "num_inference_steps": NUM_STEPS, **settings}
    return pipeline(prompt=PROMPT, output_type=output_type, **settings).images


def given(n=1):
    return torch.randn(n, NUM_TOKENS, 16, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", ["schnell", "dev"])
def test_latents_and_images_are_those_of_diffusers(kind, pipelines):
    pipeline, folder = pipelines(kind)
    guidance = {"dev": 2.5, "schnell": 0.0}[kind]
    result = ours(folder, latents=given(2), n=2, guidance=guidance)
    options = {"latents": given(2), "guidance_scale": guidance, "num_images_per_prompt": 2}
    assert relative(result.latents, theirs(pipeline, "latent", **options)) < 1e-3
    images = np.stack([image[0] for image in result.images])
    assert images.shape == (2, HEIGHT, WIDTH, 3)
    assert np.abs(images / 255 - theirs(pipeline, "np", **options)).max() < 1e-3 + 0.5 / 255


def test_noise_is_that_of_diffusers_for_a_seed(pipelines):
    pipeline, folder = pipelines("schnell")
    expected = theirs(pipeline, "latent", generator=torch.Generator().manual_seed(7))
    assert relative(ours(folder, seed=7).latents, expected) < 1e-3
    assert relative(ours(folder, seed=6, n=2).latents[1:], expected) < 1e-3


def test_bf16_is_as_close_to_the_truth_as_diffusers(pipelines):
    pipeline, folder = pipelines("dev")
    latents = given()
    truth = theirs(pipeline, "latent", latents=latents)
    half = type(pipeline).from_pretrained(folder, dtype=torch.bfloat16)
    half.set_progress_bar_config(disable=True)
    with quick_products():
        expected = theirs(half, "latent", latents=latents)
    assert rms(ours(folder, "bfloat16", latents=latents).latents - truth) <= 1.25 * rms(expected.float() - truth)


def test_kontext_edits_an_image(pipelines, monkeypatch):
    sizes = ((16, 32), (32, 24), (24, 32))
    module = require("diffusers.pipelines.flux.pipeline_flux_kontext")
    monkeypatch.setattr(module, "PREFERRED_KONTEXT_RESOLUTIONS", list(sizes))
    monkeypatch.setattr(flux, "KONTEXT_SIZES", sizes)
    pipeline, folder = pipelines("kontext")
    noise = np.random.default_rng(1).integers(0, 256, (70, 100, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    expected = theirs(pipeline, "latent", latents=given(), guidance_scale=3.5, image=image, max_area=WIDTH * HEIGHT)
    result = ours(folder, latents=given(), image=image)
    assert relative(result.latents, expected) < 1e-3
    assert relative(ours(folder, latents=given()).latents, expected) > 1e-2
    with pytest.raises(RequestError, match="image is a list of 2, expected at most 1"):
        ours(folder, image=[image, image])


def test_two_ranks_give_what_one_does(pipelines):
    _, folder = pipelines("dev")
    settings = {"width": WIDTH, "height": HEIGHT, "num_steps": 2, "latents": given(), "output": "latents"}
    alone = ours(folder, **settings).latents
    for result in run_on_ranks(2, folder, PROMPT, **settings):
        assert relative(result.latents, alone) < 1e-4


def test_reused_steps_are_close(pipelines):
    _, folder = pipelines("schnell")
    exact = ours(folder, latents=given()).latents
    assert torch.equal(ours(folder, latents=given(), step_cache=1e-9).latents, exact)
    reused = ours(folder, latents=given(), step_cache=1.0).latents
    assert 1e-6 < relative(reused, exact) < 0.5


def test_clip_reads_the_beginning_of_a_long_prompt(pipelines, caplog):
    _, folder = pipelines("schnell")
    with caplog.at_level(logging.WARNING):
        opened(folder).generate("a red cat " * 30 + "zebra", width=WIDTH, height=HEIGHT, num_steps=1, output="latents")
    (message,) = [record.getMessage() for record in caplog.records if "CLIP" in record.getMessage()]
    assert "CLIP reads 77 tokens" in message
    assert message.endswith("zebra")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image": Image.new("RGB", (64, 64))}, "takes no image"),
        ({"negative_prompt": "dogs"}, "takes no negative_prompt"),
        ({"width": 30}, "width is 30, expected a multiple of 4"),
        ({"latents": torch.zeros(1, 4, 8, 12)}, r"latents have the shape \[1, 4, 8, 12\], expected \[1, 24, 16\]"),
    ],
)
def test_requests_that_do_not_fit(settings, message, pipelines):
    _, folder = pipelines("schnell")
    with pytest.raises(RequestError, match=message):
        ours(folder, **settings)


def test_prompts_longer_than_the_text_encoder_reads(pipelines):
    _, folder = pipelines("schnell")
    with pytest.raises(RequestError, match="513 tokens"):
        opened(folder).generate(" ".join(["a"] * 512), width=WIDTH, height=HEIGHT)


def test_guidance_that_is_not_read_is_told(pipelines, caplog):
    _, folder = pipelines("schnell")
    with caplog.at_level(logging.WARNING):
        ours(folder, guidance=3.0, num_steps=1, output="latents")
    assert "guidance 3 is ignored" in caplog.text
