"""Whole runs of Qwen-Image against diffusers, from the same latents, on a tiny random checkpoint."""

import json

import numpy as np
import pytest
import tiny_qwen_image
import torch
from pipeline_ranks import run_on_ranks

from tilewright.diffusion.diffusion import Diffusion
from tilewright.types import RequestError, UnsupportedConfig

PROMPT, NEGATIVE = "a {red} cat", "blurry, out of focus"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen_image")
    return tiny_qwen_image.save(folder), folder


@pytest.fixture
def diffusion(checkpoint):
    with Diffusion(checkpoint[1], dtype="float32", pack_cache=False) as found:
        yield found


def latents_of(width, height, n=1):
    return torch.randn(n, width * height // 256, 16, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("negative", [None, NEGATIVE], ids=["plain", "guided"])
@pytest.mark.parametrize(("width", "height"), [(64, 48), (16, 80)])
def test_latents_are_those_of_diffusers(checkpoint, diffusion, width, height, negative):
    latents = latents_of(width, height)
    theirs = checkpoint[0](
        prompt=PROMPT,
        negative_prompt=negative,
        true_cfg_scale=4.0,
        latents=latents,
        width=width,
        height=height,
        num_inference_steps=4,
        output_type="latent",
    ).images
    options = {"width": width, "height": height, "num_steps": 4, "guidance": 4.0}
    ours = diffusion.generate(PROMPT, negative_prompt=negative, latents=latents, output="latents", **options).latents
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_images_are_those_of_diffusers(checkpoint, diffusion):
    """Two of them, with guidance, opened at each level."""
    pipeline = checkpoint[0]
    latents = latents_of(48, 32, n=2)
    options = {"width": 48, "height": 32, "latents": latents}
    theirs = pipeline(
        prompt=PROMPT,
        negative_prompt=NEGATIVE,
        true_cfg_scale=3.0,
        num_inference_steps=3,
        num_images_per_prompt=2,
        output_type="np",
        **options,
    ).images
    found = diffusion.generate(
        PROMPT, negative_prompt=NEGATIVE, guidance=3.0, num_steps=3, n=2, output="array", **options
    )
    ours = np.stack(found.images)
    assert ours.shape == (2, 1, 32, 48, 3)
    assert np.abs(ours[:, 0] / 255 - theirs).max() <= 0.51 / 255 + 1e-3


def test_two_ranks_make_what_one_does(checkpoint):
    options = {"negative_prompt": NEGATIVE, "num_steps": 3, "seed": 2, "width": 48, "height": 32}
    (alone,) = run_on_ranks(1, checkpoint[1], PROMPT, **options)
    first, second = run_on_ranks(2, checkpoint[1], PROMPT, **options)
    for result in (first, second):
        torch.testing.assert_close(result.latents, alone.latents, rtol=1e-4, atol=1e-4)
    assert np.abs(first.pixels.astype(int) - alone.pixels).max() <= 1
    assert second.pixels is None  # which nobody would look at


def test_noise_is_that_of_diffusers(checkpoint, diffusion):
    """A seed gives the image that a generator of the same seed gives there."""
    theirs = checkpoint[0](
        prompt=PROMPT,
        width=64,
        height=48,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(7),
        output_type="latent",
    ).images
    ours = diffusion.generate(PROMPT, width=64, height=48, num_steps=2, seed=7, output="latents").latents
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_one_step_is_finite(diffusion):
    """The last level of one step is its first: it cannot be moved to where the scheduler ends."""
    found = diffusion.generate(PROMPT, width=32, height=32, num_steps=1, seed=1, output="latents")
    assert found.latents.isfinite().all()


def test_guidance_without_a_negative_prompt_does_nothing(diffusion):
    options = {"width": 32, "height": 32, "num_steps": 2, "seed": 1, "output": "latents"}
    first, second = (diffusion.generate(PROMPT, guidance=guidance, **options).latents for guidance in (1.0, 7.0))
    assert torch.equal(first, second)


def test_bf16_runs_close_to_fp32(checkpoint, diffusion):
    options = {"negative_prompt": NEGATIVE, "width": 64, "height": 48, "num_steps": 4, "seed": 3, "output": "latents"}
    whole = diffusion.generate(PROMPT, **options).latents
    with Diffusion(checkpoint[1], dtype="bfloat16", pack_cache=False) as half_diffusion:
        half = half_diffusion.generate(PROMPT, **options).latents
    assert 0 < (half - whole).abs().mean() < 0.05 * whole.abs().mean()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "cat" * 400}, "tokens with its template, expected at most 1058"),
        ({"height": 40}, "height is 40, expected a multiple of 16"),
        ({"image": "image"}, "takes no image"),
        ({"num_frames": 5}, "num_frames is 5, expected an integer from 1 to 1"),
        ({"latents": np.zeros((1, 3, 16))}, r"shape \[1, 3, 16\], expected \[1, 4, 16\]"),
    ],
)
def test_what_cannot_be_made_is_refused(diffusion, options, message):
    options = {"width": 32, "height": 32, "num_steps": 1, **options}
    with pytest.raises(RequestError, match=message):
        diffusion.generate(options.pop("prompt", PROMPT), **options)


def test_editing_is_refused_by_name(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "QwenImageEditInpaintPipeline"}))
    with pytest.raises(UnsupportedConfig, match="InpaintPipeline, which is not supported: it takes a mask"):
        Diffusion(tmp_path)
