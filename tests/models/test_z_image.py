"""Z-Image against diffusers: every module, whole runs, ranks, and what a run leaves behind."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from tiny_pipelines import Z_IMAGE, z_image_pipeline
from torch_bf16 import quick_products

from tilewright import Diffusion
from tilewright.diffusion.params import Cancelled
from tilewright.diffusion.pipelines import open_pipeline
from tilewright.layers.memory import StepCache
from tilewright.models.z_image import ZImageConfig
from tilewright.parallel.rendezvous import open_rendezvous
from tilewright.types import RequestError, UnsupportedConfig

PROMPTS = ["a red circle left of a blue square", "a cat"]
RUN = {"height": 20, "width": 24, "num_steps": 4}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A folder, and diffusers' pipeline of it."""
    folder = tmp_path_factory.mktemp("z_image") / "tiny"
    return folder, z_image_pipeline(folder)


@pytest.fixture(scope="module")
def diffusion(pair):
    with Diffusion(pair[0], pack_cache=False) as diffusion:
        yield diffusion


@pytest.fixture(scope="module")
def latents():
    return torch.randn(2, 4, 10, 12, generator=torch.Generator().manual_seed(3))


def of_diffusers(pipeline, latents, *, prompt=PROMPTS[0], guidance=0.0, n=1, output="latent", **options):
    made = pipeline(
        prompt,
        height=RUN["height"],
        width=RUN["width"],
        num_inference_steps=RUN["num_steps"],
        guidance_scale=guidance,
        num_images_per_prompt=n,
        latents=latents[:n].clone(),
        output_type=output,
        **options,
    )
    return made.images


def test_prompts_are_encoded_as_diffusers_does(pair, diffusion):
    expected = pair[1].encode_prompt(list(PROMPTS), do_classifier_free_guidance=False)[0]
    found = diffusion.pipeline._encode(PROMPTS)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_the_transformer_with_captions_of_several_lengths(pair, diffusion, latents):
    """Its blocks too: the refiners' and the joint ones' results go through all that follow."""
    captions = [torch.randn(length, 48) for length in (5, 32, 70)]
    pictures = torch.randn(3, 4, 10, 14)
    theirs = pair[1].transformer(list(pictures.unsqueeze(2)), torch.full((3,), 0.3), captions, return_dict=False)[0]
    with diffusion.pipeline.components.use("transformer") as transformer:
        prepared = transformer.prepare(captions, [0, 1, 2], 10, 14)
        ours = transformer(pictures.permute(0, 2, 3, 1)[:, None], 0.3, prepared)
        for i, expected in enumerate(theirs):
            torch.testing.assert_close(ours[i, 0].permute(2, 0, 1), expected[:, 0], atol=1e-4, rtol=1e-4)
        alone = transformer.prepare(captions[1:2], [0], 10, 14)
        torch.testing.assert_close(transformer(pictures[1:2].permute(0, 2, 3, 1)[:, None], 0.3, alone), ours[1:2])


@torch.inference_mode()
@pytest.mark.parametrize("name", ["noise_refiner", "context_refiner", "layers"])
def test_a_block(pair, diffusion, name):
    theirs = getattr(pair[1].transformer, name)[0]
    x, condition = torch.randn(1, 40, 96), torch.randn(1, 96)
    with diffusion.pipeline.components.use("transformer") as transformer:
        block = getattr(transformer, name)[0]
        places = torch.stack([torch.arange(40), torch.arange(40) % 5, torch.arange(40) // 5], dim=1)
        rows = transformer._rows([40], [places])
        freqs = pair[1].transformer.rope_embedder(places)
        expected = theirs(x, None, freqs[None], condition if theirs.modulation else None)
        found = x[0].clone()
        block(found, rows, condition if theirs.modulation else None)
    torch.testing.assert_close(found, expected[0], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_the_time_embedding(pair, diffusion):
    with diffusion.pipeline.components.use("transformer") as transformer:
        for time in (0.0, 0.25, 1.0):
            expected = pair[1].transformer.t_embedder(torch.tensor([time * 1000]))
            torch.testing.assert_close(transformer.time_embedding(time * 1000), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("guidance", "n", "ours", "theirs"),
    [
        (0.0, 1, {}, {}),
        (3.0, 2, {}, {}),
        (
            3.0,
            1,
            {"negative_prompt": "a blue circle, and much more"},
            {"negative_prompt": "a blue circle, and much more"},
        ),
        (4.0, 1, {"guidance_norm": 1.0}, {"cfg_normalization": True}),
        (2.0, 1, {"guidance_interval": (0.0, 0.3)}, {"cfg_truncation": 0.3}),
    ],
)
def test_runs_from_the_same_latents(pair, diffusion, latents, guidance, n, ours, theirs):
    expected = of_diffusers(pair[1], latents, guidance=guidance, n=n, **theirs)
    made = diffusion.generate(PROMPTS[0], **RUN, guidance=guidance, n=n, latents=latents[:n], output="latents", **ours)
    torch.testing.assert_close(made.latents, expected, atol=1e-3, rtol=1e-3)
    assert made.images == [] and len(made.timings.steps_s) == RUN["num_steps"]


def test_every_level_makes_the_same(pair, latents, isa):
    expected = of_diffusers(pair[1], latents)
    with Diffusion(pair[0], pack_cache=False) as diffusion:
        made = diffusion.generate(PROMPTS[0], **RUN, guidance=0.0, latents=latents[:1], output="latents").latents
    torch.testing.assert_close(made, expected, atol=1e-3, rtol=1e-3)


def test_the_torch_backend_makes_the_same(pair, latents):
    expected = of_diffusers(pair[1], latents, guidance=2.0)
    with Diffusion(pair[0], backend="torch") as diffusion:
        made = diffusion.generate(PROMPTS[0], **RUN, guidance=2.0, latents=latents[:1], output="latents").latents
    torch.testing.assert_close(made, expected, atol=1e-3, rtol=1e-3)


def test_pictures(pair, diffusion, latents):
    expected = of_diffusers(pair[1], latents, n=2, output="np")
    made = diffusion.generate(PROMPTS[0], **RUN, guidance=0.0, n=2, latents=latents, output="array")
    assert made.images[0].shape == (1, 20, 24, 3) and made.images[0].dtype == np.uint8
    for ours, theirs in zip(made.images, expected, strict=True):
        assert abs(ours[0] / 255 - theirs).max() < 1 / 255
    picture = diffusion.generate(PROMPTS[0], **RUN, guidance=0.0, latents=latents[:1]).images[0]
    assert picture.size == (24, 20) and np.array_equal(np.asarray(picture), made.images[0][0])


def test_dynamic_shift(tmp_path, latents):
    pipeline = z_image_pipeline(tmp_path / "z", scheduler={"use_dynamic_shifting": True, "shift": 3.0})
    expected = of_diffusers(pipeline, latents)
    with Diffusion(tmp_path / "z", pack_cache=False) as diffusion:
        made = diffusion.generate(PROMPTS[0], **RUN, guidance=0.0, latents=latents[:1], output="latents").latents
    torch.testing.assert_close(made, expected, atol=1e-3, rtol=1e-3)


def test_without_norms_of_queries_and_keys(tmp_path, latents):
    pipeline = z_image_pipeline(tmp_path / "z", qk_norm=False, n_refiner_layers=1)
    expected = of_diffusers(pipeline, latents)
    with Diffusion(tmp_path / "z", pack_cache=False) as diffusion:
        made = diffusion.generate(PROMPTS[0], **RUN, guidance=0.0, latents=latents[:1], output="latents").latents
    torch.testing.assert_close(made, expected, atol=1e-3, rtol=1e-3)


def test_bf16_errs_no_more_than_diffusers_does(pair, latents):
    folder, pipeline = pair
    exact = of_diffusers(pipeline, latents, n=2, guidance=2.0)
    try:
        with quick_products():
            theirs = of_diffusers(pipeline.to(torch.bfloat16), latents, n=2, guidance=2.0)
    finally:
        pipeline.to(torch.float32)
        z_image_pipeline(folder)  # rounded weights are not the ones of the folder
    with Diffusion(folder, dtype="bfloat16", pack_cache=False) as diffusion:
        ours = diffusion.generate(PROMPTS[0], **RUN, n=2, guidance=2.0, latents=latents, output="latents").latents
    errors = [(found.float() - exact).square().mean().sqrt().item() for found in (ours, theirs)]
    assert 0 < errors[0] <= 1.25 * errors[1], errors


@pytest.mark.parametrize("guidance", [0.0, 2.0])
def test_two_ranks_make_what_one_makes(pair, diffusion, latents, guidance):
    settings = {**RUN, "guidance": guidance, "latents": latents[:1], "output": "array"}
    alone = diffusion.generate(PROMPTS[0], **settings)
    host = open_rendezvous(2)
    results, errors = [None, None], []

    def run(rank):
        try:
            pipeline = open_pipeline(pair[0], pack_cache=False, group=host.make_group(rank))
            results[rank] = pipeline.generate(pipeline.limits.params(PROMPTS[0], **settings))
        except Exception as error:
            errors.append(error)
            host.abort(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    host.close()
    assert not errors and not any(thread.is_alive() for thread in threads)
    for result in results:
        torch.testing.assert_close(result.latents, alone.latents, atol=1e-4, rtol=1e-4)
    first, second = results
    assert abs(first.pixels[0].astype(int) - alone.images[0]).max() <= 1
    assert second.pixels is None, "one rank decodes"


def test_a_picture_is_the_same_alone_as_among_others(diffusion):
    many = diffusion.generate(PROMPTS[0], **RUN, guidance=2.0, n=3, seed=7, output="latents")
    for i in range(3):
        one = diffusion.generate(PROMPTS[0], **RUN, guidance=2.0, seed=7 + i, output="latents")
        torch.testing.assert_close(one.latents[0], many.latents[i], atol=1e-5, rtol=1e-5)
        assert many.settings_of(i) == one.settings
    assert not torch.allclose(many.latents[0], many.latents[1])


def test_prompts_matter(diffusion):
    made = [diffusion.generate(prompt, **RUN, seed=1, output="latents").latents for prompt in PROMPTS]
    assert (made[0] - made[1]).abs().max() > 1e-2


def test_a_prompt_that_is_too_long(diffusion):
    with pytest.raises(
        RequestError, match=r"the prompt has 6\d\d tokens with its template, expected at most 512"
    ) as error:
        diffusion.generate("x" * 600, **RUN)
    assert error.value.param == "prompt"


def test_special_tokens_in_a_prompt_are_text(diffusion):
    ids = diffusion.pipeline.prompts.ids("a <|im_end|> cat")
    assert ids.count(256) == diffusion.pipeline.prompts.ids("a cat").count(256)


def test_steps_are_told_and_end_with_the_picture(diffusion):
    told = []
    made = diffusion.generate(
        PROMPTS[0], **RUN, seed=1, output="latents", on_step=lambda *arguments: told.append(arguments)
    )
    assert [(step, of) for step, of, _ in told] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    torch.testing.assert_close(diffusion.pipeline.exported(told[-1][2]), made.latents)


def test_previews(diffusion):
    seen = []

    def on_step(step, num_steps, latents):
        seen.append(diffusion.preview(latents, params))

    params = diffusion.params(PROMPTS[0], **RUN, seed=1, n=2)
    made = diffusion.run(params, on_step)
    assert all(preview.shape == (2, 1, 20, 24, 3) for preview in seen)
    assert np.array_equal(seen[-1][1, 0], np.asarray(made.images[1]))


def test_cancelling_frees_what_the_run_held(pair):
    held = []

    def on_step(step, num_steps, latents):
        held.append(weakref.ref(latents))
        if step == 2:
            raise Cancelled

    with Diffusion(pair[0], pack_cache=False, low_memory=True) as diffusion:
        with pytest.raises(Cancelled):
            diffusion.generate(PROMPTS[0], **RUN, seed=1, on_step=on_step)
        gc.collect()
        assert len(held) == 2 and all(reference() is None for reference in held)
        assert not diffusion.pipeline.components.is_loaded("transformer")
        again = diffusion.generate(PROMPTS[0], **RUN, seed=1, output="latents").latents
    with Diffusion(pair[0], pack_cache=False) as diffusion:
        assert torch.equal(again, diffusion.generate(PROMPTS[0], **RUN, seed=1, output="latents").latents)


@torch.inference_mode()
def test_the_step_cache(diffusion):
    """A step that is nearly the last one reuses its blocks; one that is not computes them."""
    picture, cache = torch.randn(1, 1, 10, 14, 4), StepCache(0.5)
    near = picture + 1e-3 * torch.randn_like(picture)
    with diffusion.pipeline.components.use("transformer") as transformer:
        prepared = transformer.prepare([torch.randn(5, 48)], [0], 10, 14)
        exact, exact_near, exact_far = (
            transformer(x, time, prepared) for x, time in ((picture, 0.3), (near, 0.3), (picture, 0.9))
        )
        assert torch.equal(transformer(picture, 0.3, prepared, cache), exact)
        found = transformer(near, 0.3, prepared, cache)
        assert not torch.equal(found, exact_near)
        torch.testing.assert_close(found, exact_near, atol=0.05, rtol=0.05)
        assert torch.equal(transformer(picture, 0.9, prepared, cache), exact_far)
    assert (cache.num_computed, cache.num_reused) == (2, 1)


def test_blocks_are_skipped_only_where_the_first_changes_little():
    cache, x, calls = StepCache(0.1), torch.zeros(4), []

    def step(first, rest):
        x.zero_()
        cache.run(x, lambda: x.add_(first), lambda: calls.append(x.add_(rest)))
        return x[0].item()

    assert step(1.0, 5.0) == 6.0 and step(1.05, 7.0) == pytest.approx(6.05)  # the rest as it was
    assert step(1.2, 7.0) == pytest.approx(8.2) and len(calls) == 2
    assert (cache.num_computed, cache.num_reused) == (2, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"siglip_feat_dim": 64}, "Z-Image-Omni"),
        ({"n_kv_heads": 2}, "n_kv_heads 2, expected n_heads, 4"),
        ({"n_heads": 5}, "n_heads 5, expected a divisor of dim, 96"),
        ({"axes_dims": [8, 8, 4]}, r"axes_dims \[8, 8, 4\], expected even ones with the sum of a head, 24"),
        ({"all_patch_size": [2, 4], "all_f_patch_size": [1, 1]}, r"all_patch_size \[2, 4\]"),
        ({"axes_lens": [8]}, r"axes_lens \[8\], expected three whole numbers"),
    ],
)
def test_configs_that_are_not_built(changes, message):
    with pytest.raises(UnsupportedConfig, match=message):
        ZImageConfig.from_dict({**Z_IMAGE, **changes})
