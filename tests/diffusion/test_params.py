"""Requests for images: defaults, and clear errors for what cannot be made."""

import math

import numpy as np
import pytest
import torch

from tilewright.diffusion.params import MAX_PROMPT_CHARACTERS, MAX_SEED, Limits
from tilewright.diffusion.pipeline import given_latents, noise
from tilewright.types import RequestError

LIMITS = Limits(
    size_multiple=16,
    default_width=512,
    default_height=256,
    default_steps=8,
    default_guidance=2.5,
    max_pixels=1 << 20,
    max_side=2048,
    max_frames=9,
    frame_multiple=4,
)


def test_defaults_are_the_pipelines():
    params = LIMITS.params("a cat", width=None, seed=3)
    assert (params.width, params.height, params.num_steps, params.guidance) == (512, 256, 8, 2.5)
    assert (params.seed, params.n, params.num_frames, params.output) == (3, 1, 1, "pil")


def test_without_a_seed_one_is_drawn():
    assert len({LIMITS.params("a cat").seed for _ in range(8)}) > 1


def test_numbers_of_numpy_are_numbers():
    params = LIMITS.params("a cat", width=np.int64(64), guidance=np.float32(1.5), seed=np.uint32(7))
    assert (params.width, params.guidance, params.seed) == (64, 1.5, 7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"width": 500}, "width is 500, expected a multiple of 16: 496 or 512, say"),
        ({"width": 0}, "width is 0, expected an integer from 16 to 2048"),
        ({"height": 4096}, "height is 4096, expected an integer from 16 to 2048"),
        ({"height": 512.0}, "height is 512.0, expected an integer"),
        ({"height": True}, "height is True, expected an integer"),
        ({"width": 2048, "height": 1024}, "2048 x 1024, 2097152 pixels, expected at most 1048576"),
        ({"num_steps": 0}, "num_steps is 0, expected an integer from 1 to 200"),
        ({"num_steps": 10**9}, "num_steps is 1000000000, expected an integer from 1 to 200"),
        ({"guidance": math.nan}, "guidance is nan, expected a number from 0 to 100"),
        ({"guidance": -1}, "guidance is -1, expected a number from 0 to 100"),
        ({"guidance": "3"}, "guidance is '3', expected a number"),
        ({"num_frames": 10}, "num_frames is 10, expected an integer from 1 to 9"),
        ({"num_frames": 8}, "num_frames is 8, expected 1 more than a multiple of 4: 5, say"),
        ({"seed": -1}, f"seed is -1, expected an integer from 0 to {MAX_SEED}"),
        ({"n": 17}, "n is 17, expected an integer from 1 to 16"),
        ({"output": "jpeg"}, "output is 'jpeg', expected pil, array, latents"),
        ({"image": object()}, "takes no image"),
        ({"step_cache": 2}, "step_cache is 2, expected a number from 0 to 1"),
        ({"guidance_interval": (0.5, 0.2)}, "guidance_interval is 0.5 to 0.2"),
        ({"guidance_interval": 0.5}, "guidance_interval is 0.5, expected two numbers"),
        ({"negative_prompt": 3}, "negative_prompt is a int, expected text"),
        ({"steps": 3}, "steps is not a setting of an image"),
        ({"prompt": 7}, "prompt is a int, expected text"),
        ({"prompt": "x" * (MAX_PROMPT_CHARACTERS + 1)}, f"expected at most {MAX_PROMPT_CHARACTERS}"),
    ],
)
def test_errors_name_the_value_and_the_limit(given, message):
    with pytest.raises(RequestError, match=message.replace("(", r"\(")):
        LIMITS.params(**{"prompt": "a cat", **given})


def test_the_field_at_fault_is_named():
    with pytest.raises(RequestError) as caught:
        LIMITS.params("a cat", height=100)
    assert caught.value.param == "height"


@pytest.mark.parametrize(
    ("latents", "message"),
    [
        (torch.zeros(1, 4, 8, 9), r"latents have the shape \[1, 4, 8, 9\], expected \[2, 4, 8, 8\] for 2"),
        (torch.full((2, 4, 8, 8), math.nan), "latents have values that are not finite"),
        ("noise", "latents are not a tensor"),
    ],
)
def test_latents_are_checked(latents, message):
    with pytest.raises(RequestError, match=message):
        given_latents(LIMITS.params("a cat", latents=latents, n=2), (4, 8, 8))


def test_one_set_of_latents_serves_all_images():
    given = np.arange(16.0).reshape(1, 1, 4, 4)
    latents = given_latents(LIMITS.params("a cat", latents=given, n=3), (1, 4, 4))
    assert latents.shape == (3, 1, 4, 4) and torch.equal(latents[2], torch.from_numpy(given[0]).float())


def test_an_image_has_its_own_noise_whatever_comes_with_it():
    many = given_latents(LIMITS.params("a cat", seed=5, n=3), (4, 8, 8))
    for i, seed in enumerate((5, 6, 7)):
        assert torch.equal(many[i : i + 1], given_latents(LIMITS.params("a cat", seed=seed), (4, 8, 8)))
        assert torch.equal(many[i], torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(seed)))
    assert torch.equal(noise((2,), [MAX_SEED]), noise((2,), LIMITS.params("", seed=MAX_SEED).seeds))
    assert LIMITS.params("", seed=MAX_SEED, n=2).seeds == (MAX_SEED, 0)


def test_settings_make_an_image_again():
    params = LIMITS.params("a cat", seed=5, n=3, negative_prompt="dogs", guidance_interval=(0.0, 0.5))
    settings = params.settings(2)
    assert settings["seed"] == 7 and "step_cache" not in settings and settings["negative_prompt"] == "dogs"
    again = LIMITS.params(**settings)
    assert again.settings() == settings and again.guidance_interval == (0.0, 0.5)


def test_guidance_within_its_interval_alone():
    params = LIMITS.params("", guidance_interval=(0.25, 0.5))
    assert [params.is_guided(sigma) for sigma in (1.0, 0.75, 0.5, 0.25)] == [False, True, True, False]
