"""Every pipeline on a device of its own: nothing of an image lies on the host, nothing waits before its pixels."""

import numpy as np
import pytest
import tiny_flux
import tiny_pipelines
import tiny_qwen_image
import tiny_wan
import torch
from fake_device import NoValues
from oracle import require
from PIL import Image

from tilewright.diffusion.diffusion import Diffusion
from tilewright.diffusion.pipelines import flux
from tilewright.ops import platform

IMAGE = Image.fromarray(np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3))
PIPELINES = {
    "z_image": (tiny_pipelines.z_image_pipeline, {}),
    "flux": (lambda folder: tiny_flux.flux_pipeline(folder, "schnell"), {}),
    "flux_kontext": (lambda folder: tiny_flux.flux_pipeline(folder, "dev", "FluxKontextPipeline"), {"image": IMAGE}),
    "flux2": (lambda folder: tiny_flux.klein_pipeline(folder, is_distilled=True), {}),
    "flux2_edit": (lambda folder: tiny_flux.klein_pipeline(folder, is_distilled=True), {"image": IMAGE}),
    "qwen_image": (tiny_qwen_image.save, {}),
    "wan": (tiny_wan.save, {"num_frames": 5}),
}


class Fetching(NoValues):
    def __init__(self):
        super().__init__()
        self.fetched = []

    def fetch(self, tensor):
        self.fetched.append(tensor)
        return super().fetch(tensor)


@pytest.mark.parametrize("name", PIPELINES)
def test_an_image_is_made_where_its_network_is(name, monkeypatch, tmp_path):
    """In both types; what comes back are pixels and latents."""
    require("diffusers")
    monkeypatch.setattr(flux, "KONTEXT_SIZES", ((64, 64),))
    save, options = PIPELINES[name]
    save(tmp_path)
    for dtype in ("float32", "bfloat16"):
        place = Fetching()
        own = platform.Platform("cuda:0", "torch", "flash", platform.WORKER, False, lambda: 10**12, place)
        monkeypatch.setattr(platform, "resolve", lambda *device, own=own, **others: own)
        with Diffusion(tmp_path, dtype=dtype, device="cuda", pack_cache=False) as diffusion:
            made = diffusion.generate("an image", num_steps=2, seed=1, output="array", width=64, height=64, **options)
        pixels, latents = place.fetched
        assert pixels.dtype == torch.uint8 and made.images[0].shape[-3:] == (64, 64, 3)
        assert made.latents.shape == latents.shape and latents.dtype == torch.float32
