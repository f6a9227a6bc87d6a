"""Whole runs of Wan against diffusers, from the same latents, on tiny random checkpoints."""

import numpy as np
import pytest
import tiny_wan
import torch

from tilewright.diffusion.diffusion import Diffusion

PROMPT, NEGATIVE = "the red cat &amp; in  the rain", "a blurry cat"
SIZE = {"width": 48, "height": 32}


@pytest.fixture(scope="module")
def text_to_video(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan")
    return tiny_wan.save(folder), folder


def latents_of(num_frames, n=1, factor=8, channels=4, **size):
    size = {**SIZE, **size}
    shape = n, channels, (num_frames - 1) // 4 + 1, size["height"] // factor, size["width"] // factor
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def check_run(pipeline, folder, latents, *, output="latents", n=1, image=None, num_steps=4, tolerance=1e-3, **options):
    size = {name: options.pop(name, value) for name, value in SIZE.items()}
    guidance = options.pop("guidance", 5.0)
    theirs = pipeline(
        prompt=PROMPT,
        negative_prompt=NEGATIVE,
        latents=latents,
        num_inference_steps=num_steps,
        num_videos_per_prompt=n,
        guidance_scale=guidance,
        output_type="latent" if output == "latents" else "np",
        **({} if image is None else {"image": image}),
        **size,
        **options,
    ).frames
    with Diffusion(folder, dtype="float32", pack_cache=False) as diffusion:
        found = diffusion.generate(
            PROMPT,
            negative_prompt=NEGATIVE,
            latents=latents,
            num_steps=num_steps,
            n=n,
            guidance=guidance,
            output=output,
            image=image,
            **size,
            **options,
        )
    if output == "latents":
        torch.testing.assert_close(found.latents, theirs, rtol=tolerance, atol=tolerance)
    else:
        assert np.abs(np.stack(found.images) / 255 - theirs).max() <= 0.51 / 255 + tolerance
    return found


@pytest.mark.parametrize("num_frames", [1, 9])
def test_latents_are_those_of_diffusers(text_to_video, num_frames):
    check_run(*text_to_video, latents_of(num_frames), num_frames=num_frames)


def test_without_guidance(text_to_video):
    check_run(*text_to_video, latents_of(5), num_frames=5, guidance=1.0)
