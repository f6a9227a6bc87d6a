"""Whole runs of Qwen-Image against diffusers, from the same latents, on a tiny random checkpoint."""

import pytest
import tiny_qwen_image
import torch

from tilewright.diffusion.diffusion import Diffusion

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
