"""The embedded model that draws: what its captions say is what the model that sees finds, and diffusers' way to the
same images is ours.
"""

from itertools import islice
from random import Random

import pytest
from oracle import require

from tilewright import Diffusion, Engine
from tilewright.types import RequestError
from tilewright.weights import embedded
from training.tiny_draw.captions import drawings
from training.tiny_draw.evaluate import mistakes

NUM_CAPTIONS, NUM_RIGHT = 8, 6  # of 200 it draws 91 % right (docs/embedded.md); a few may differ from CPU to CPU
MAX_BYTES = 30_000_000


@pytest.fixture(scope="module")
def painter():
    with Diffusion() as painter:
        yield painter


def test_it_draws_what_captions_say(painter):
    wrong = {}
    with Engine(max_sequences=1) as judge:
        for seed, drawing in enumerate(islice(drawings(Random("test"), set_name="test"), NUM_CAPTIONS)):
            image = painter.generate(drawing.caption, seed=seed).images[0]
            if found := mistakes(judge, drawing, image):
                wrong[drawing.caption] = found
    assert len(wrong) <= NUM_CAPTIONS - NUM_RIGHT, wrong


def test_sizes_it_was_not_taught_are_refused(painter):
    for width, height in ((256, 256), (320, 320), (384, 256)):
        painter.params("a red circle", width=width, height=height)
    with pytest.raises(RequestError, match="width is 1024, expected an integer from 16 to 384"):
        painter.params("a red circle", width=1024, height=1024)
    with pytest.raises(RequestError, match="147456 pixels, expected at most 102400: 320 x 320, say"):
        painter.params("a red circle", width=384, height=384)


def test_diffusers_draws_the_same(painter):
    require("diffusers")
    import torch
    from diffusers import ZImagePipeline

    theirs = ZImagePipeline.from_pretrained(embedded.path("tiny_draw"), torch_dtype=torch.float32)
    theirs.set_progress_bar_config(disable=True)
    latents = torch.randn(1, 8, 24, 24, generator=torch.Generator().manual_seed(0))
    settings = {"height": 192, "width": 192, "latents": latents}
    caption = "a green star above two orange hearts"
    expected = theirs(caption, num_inference_steps=4, guidance_scale=2.0, output_type="latent", **settings).images
    with Diffusion(dtype="float32") as ours:
        found = ours.generate(caption, num_steps=4, guidance=2.0, output="latents", **settings).latents
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_its_files_are_small():
    files = [file for file in embedded.path("tiny_draw").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < MAX_BYTES
