"""Whole runs of Wan against diffusers, from the same latents, on tiny random checkpoints."""

import functools
import importlib
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_wan
import torch
from oracle import require
from PIL import Image
from pipeline_ranks import run_on_ranks

from tilewright import config
from tilewright.diffusion import components
from tilewright.diffusion.diffusion import Diffusion
from tilewright.types import RequestError, UnsupportedConfig

PROMPT, NEGATIVE = "the red cat &amp; in  the rain", "a blurry cat"
SIZE, WIDER = {"width": 48, "height": 32}, {"width": 64, "height": 32}
# The image's latents, and for each frame of a latent one, whether it is given.
IMAGE_CHANNELS = {"in_channels": 4 + 4 + 4, "out_channels": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """diffusers' pipeline and its folder, made when first asked for."""

    @functools.cache
    def of_kind(kind):
        folder = tmp_path_factory.mktemp(kind)
        return KINDS[kind](folder), folder

    return of_kind


def save_two_experts(folder):
    return tiny_wan.save(folder, transformer_2=tiny_wan.make_transformer(seed=1), boundary_ratio=0.875)


def save_ti2v(folder):
    vae = tiny_wan.make_vae(tiny_wan.VAE_22)
    return tiny_wan.save(folder, vae=vae, scheduler=tiny_wan.make_scheduler(5.0), expand_timesteps=True)


def save_i2v(folder):
    experts = [tiny_wan.make_transformer(seed, **IMAGE_CHANNELS) for seed in (0, 1)]
    return tiny_wan.save(
        folder, "WanImageToVideoPipeline", transformer=experts[0], transformer_2=experts[1], boundary_ratio=0.9
    )


def save_with(name, **config):
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    config = config or flow
    return lambda folder: tiny_wan.save(folder, scheduler=getattr(require("diffusers"), name)(**config))


def save_calm(folder):
    """With a transformer that changes as slowly with the timestep as real ones do."""
    transformer = tiny_wan.make_transformer()
    with torch.no_grad():
        transformer.condition_embedder.time_proj.weight.mul_(0.05)
    return tiny_wan.save(folder, transformer=transformer)


KINDS = {
    "calm": save_calm,
    "t2v": tiny_wan.save,
    "two_experts": save_two_experts,
    "ti2v": save_ti2v,
    "i2v": save_i2v,
    "dpm": save_with("DPMSolverMultistepScheduler"),
    "euler": save_with("FlowMatchEulerDiscreteScheduler", shift=5.0),
}


def latents_of(num_frames, n=1, factor=8, width=48, height=32):
    shape = n, 4, (num_frames - 1) // 4 + 1, height // factor, width // factor
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def image():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 72, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@functools.cache
def opened(folder, dtype="float32", low_memory=False):
    return Diffusion(folder, dtype=dtype, pack_cache=False, low_memory=low_memory)


def generate(folder, latents, *, dtype="float32", low_memory=False, **options):
    options = {"negative_prompt": NEGATIVE, "num_steps": 4, "guidance": 5.0, **SIZE, **options}
    return opened(folder, dtype, low_memory).generate(options.pop("prompt", PROMPT), latents=latents, **options)


def check_run(of_kind, latents, *, num_frames, n=1, image=None, guidance=5.0, num_steps=4, size=SIZE):
    """Latents after all steps, and the pixels of them."""
    pipeline, folder = of_kind
    theirs = pipeline(
        prompt=PROMPT,
        negative_prompt=NEGATIVE,
        latents=latents,
        num_frames=num_frames,
        num_inference_steps=num_steps,
        num_videos_per_prompt=n,
        guidance_scale=guidance,
        output_type="latent",
        **({} if image is None else {"image": image}),
        **size,
    ).frames
    found = generate(
        folder,
        latents,
        num_frames=num_frames,
        num_steps=num_steps,
        n=n,
        guidance=guidance,
        output="array",
        image=image,
        **size,
    )
    torch.testing.assert_close(found.latents, theirs, rtol=1e-3, atol=1e-3)
    config = pipeline.vae.config
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std))
    with torch.no_grad():
        pixels = pipeline.vae.decode(theirs * std + mean).sample.permute(0, 2, 3, 4, 1)
    ours = torch.from_numpy(np.stack(found.images)).float() / 127.5 - 1
    assert ours.shape == pixels.shape == (n, num_frames, size["height"], size["width"], 3)
    assert (ours - pixels).abs().max() <= 0.51 / 127.5 + 1e-3
    return found


@pytest.mark.parametrize("num_frames", [1, 9])
def test_text_to_video_is_that_of_diffusers(checkpoint, num_frames):
    check_run(checkpoint("t2v"), latents_of(num_frames), num_frames=num_frames)


def test_two_videos_of_another_size(checkpoint):
    size = {"width": 16, "height": 80}
    check_run(checkpoint("t2v"), latents_of(5, n=2, **size), num_frames=5, n=2, size=size)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_few_steps_without_guidance(checkpoint, num_steps):
    check_run(checkpoint("t2v"), latents_of(5), num_frames=5, guidance=1.0, num_steps=num_steps)


@pytest.mark.parametrize("scheduler", ["dpm", "euler"])
def test_other_schedulers(checkpoint, scheduler):
    check_run(checkpoint(scheduler), latents_of(5), num_frames=5)


def test_high_and_low_noise_have_a_transformer_each(checkpoint):
    pipeline, folder = checkpoint("two_experts")
    check_run((pipeline, folder), latents_of(5), num_frames=5)
    one = generate(checkpoint("t2v")[1], latents_of(5), num_frames=5, output="latents").latents
    two = generate(folder, latents_of(5), num_frames=5, output="latents").latents
    assert (one - two).abs().max() > 0.1


def test_ti2v_of_a_text(checkpoint):
    check_run(checkpoint("ti2v"), latents_of(9, factor=16, width=64), num_frames=9, size=WIDER)


@pytest.fixture
def without_ftfy(monkeypatch):
    """diffusers' pipeline of images calls that package whether it is there or not; it does nothing to these texts."""
    module = importlib.import_module(require("diffusers").WanImageToVideoPipeline.__module__)
    monkeypatch.setattr(module, "ftfy", SimpleNamespace(fix_text=lambda text: text), raising=False)


def test_ti2v_begins_with_the_image(checkpoint, without_ftfy):
    text_pipeline, folder = checkpoint("ti2v")
    components = {name: part for name, part in text_pipeline.components.items() if name in KEPT}
    pipeline = require("diffusers").WanImageToVideoPipeline(**components, expand_timesteps=True)
    pipeline.set_progress_bar_config(disable=True)
    latents = latents_of(9, factor=16, width=64)
    check_run((pipeline, folder), latents, num_frames=9, image=image(), size=WIDER)


KEPT = ("tokenizer", "text_encoder", "vae", "scheduler", "transformer")


def test_i2v_reads_the_image_as_channels(checkpoint, without_ftfy):
    check_run(checkpoint("i2v"), latents_of(9), num_frames=9, image=image())


def test_two_ranks_make_what_one_does(checkpoint):
    """From an image: text encoder and transformer are split, and both ranks encode it."""
    folder = checkpoint("ti2v")[1]
    options = {"negative_prompt": NEGATIVE, "num_steps": 3, "num_frames": 5, "seed": 2, "image": image(), **WIDER}
    (alone,) = run_on_ranks(1, folder, PROMPT, **options)
    first, second = run_on_ranks(2, folder, PROMPT, **options)
    for result in (first, second):
        torch.testing.assert_close(result.latents, alone.latents, rtol=1e-4, atol=1e-4)
    assert np.abs(first.pixels.astype(int) - alone.pixels).max() <= 1
    assert second.pixels is None  # which nobody would look at


def test_streamed_layers_give_the_same(checkpoint, tmp_path, monkeypatch):
    """Two layers at a time; keys and values of the text are computed before the steps, of all layers."""
    folder = checkpoint("t2v")[1]
    settings = replace(config.current(), cache_dir=tmp_path / "cache")
    monkeypatch.setattr(config, "current", lambda: settings)
    size = {"width": 32, "height": 32, "num_frames": 5, "num_steps": 2, "seed": 1, "output": "latents"}
    with Diffusion(folder, dtype="float32", stream_layers="1GB") as diffusion:
        expected = diffusion.generate(PROMPT, **size).latents
        for name in ("text_encoder", "transformer"):
            stream = diffusion.pipeline.components._networks[name].blocks[0]._stream
            assert stream.num_kept == len(stream.ranges)
            stream.num_kept = 0  # layers are too small for a budget to be below them
        assert torch.equal(diffusion.generate(PROMPT, **size).latents, expected)
        assert len(stream._reading) <= 2
    with Diffusion(folder, dtype="float32", pack_cache=False) as diffusion:
        assert torch.equal(diffusion.generate(PROMPT, **size).latents, expected)


def test_low_memory_gives_the_same(checkpoint):
    folder = checkpoint("two_experts")[1]
    kept, released = (
        generate(folder, latents_of(5), num_frames=5, output="latents", low_memory=low).latents for low in (False, True)
    )
    assert torch.equal(kept, released)


def test_bf16_runs_close_to_fp32(checkpoint):
    folder = checkpoint("t2v")[1]
    whole, half = (
        generate(folder, latents_of(5), num_frames=5, output="latents", dtype=dtype).latents
        for dtype in ("float32", "bfloat16")
    )
    assert 0 < (half - whole).abs().max() < 0.2 * whole.abs().max()


@pytest.mark.parametrize("saving", [{"step_cache": 0.5}, {"guidance_interval": (0.0, 0.5)}])
def test_savings_change_little(checkpoint, saving):
    folder = checkpoint("calm")[1]
    options = {"num_frames": 5, "output": "latents", "num_steps": 12}
    plain = generate(folder, latents_of(5), **options).latents
    saved = generate(folder, latents_of(5), **options, **saving).latents
    assert 0 < (saved - plain).abs().mean() < 0.5 * plain.abs().mean()


def test_pil_gives_frames_and_settings_tell_the_rest(checkpoint):
    found = generate(checkpoint("t2v")[1], None, num_frames=5, seed=11)
    (frames,) = found.images
    assert [frame.size for frame in frames] == [(48, 32)] * 5
    assert found.settings["seed"] == 11
    assert found.settings["num_frames"] == 5
    again = generate(checkpoint("t2v")[1], None, num_frames=5, seed=11)
    assert np.array_equal(np.asarray(frames[4]), np.asarray(again.images[0][4]))


def test_a_preview_is_one_small_frame(checkpoint):
    shapes = []
    diffusion = opened(checkpoint("t2v")[1])
    params = diffusion.params(PROMPT, num_frames=5, num_steps=2, **SIZE)
    diffusion.run(params, lambda step, steps, latents: shapes.append(diffusion.preview(latents, params).shape))
    assert shapes == [(1, 1, 32, 48, 3)] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_frames": 6}, "num_frames is 6, expected 1 more than a multiple of 4: 5"),
        ({"width": 40}, "width is 40, expected a multiple of 16"),
        ({"image": "image"}, "takes no image"),
        ({"prompt": "cat " * 600}, "601 tokens with its template, expected at most 512"),
        ({"latents": np.zeros((1, 4, 2, 4, 6))}, r"shape \[1, 4, 2, 4, 6\], expected \[1, 4, 1, 4, 6\]"),
    ],
)
def test_what_cannot_be_made_is_refused(checkpoint, options, message):
    with pytest.raises(RequestError, match=message):
        generate(checkpoint("t2v")[1], options.pop("latents", None), **{"num_frames": 1, **options})


def test_i2v_without_an_image_is_refused(checkpoint):
    with pytest.raises(RequestError, match="needs an image"):
        generate(checkpoint("i2v")[1], None, num_frames=5)


def test_an_image_through_clip_is_refused_by_name(checkpoint, tmp_path):
    folder = checkpoint("t2v")[1]
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    index = json.loads((folder / "model_index.json").read_text())
    (tmp_path / "model_index.json").unlink()
    index["image_encoder"] = ["transformers", "CLIPVisionModel"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedConfig, match="image_encoder"):
        Diffusion(tmp_path)


def test_defaults_are_those_of_the_family(checkpoint):
    with Diffusion(checkpoint("t2v")[1]) as small, Diffusion(checkpoint("ti2v")[1]) as large:
        first, second = small.limits, large.limits
    assert (first.default_width, first.default_height, first.default_frames, first.fps) == (832, 480, 81, 16)
    assert (second.default_width, second.default_height, second.default_frames, second.fps) == (1280, 704, 121, 24)
    assert (first.takes_image, second.takes_image, second.needs_image) == (False, True, False)


def test_a_large_network_in_fp32_is_told(checkpoint, monkeypatch, caplog):
    """Wan's transformers are published so, and half the time is a lot of it."""
    folder = checkpoint("t2v")[1]
    monkeypatch.setattr(components, "LARGE_BYTES", 40_000)
    opened.cache_clear()  # it is told when they are loaded
    options = {"num_frames": 1, "num_steps": 1, "guidance": 1.0, "output": "latents"}
    generate(folder, None, dtype="float32", **options)
    assert not caplog.text
    generate(folder, None, dtype="auto", **options)
    assert "transformer is stored and computed in float32; dtype bfloat16 takes half" in caplog.text
