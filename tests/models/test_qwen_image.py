"""The transformer of Qwen-Image against diffusers, on a tiny random config."""

import pytest
import torch
from components import loaded, loaded_on_ranks, randomized, rms, sources_of
from oracle import require

from tilewright.layers.memory import StepCache
from tilewright.models import qwen_image
from tilewright.models.qwen_image import QwenImageConfig
from tilewright.types import RequestError, UnsupportedConfig

TINY = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}
GRIDS = [(1, 1), (4, 4), (3, 7)]
TIMESTEP = 731.5


def make_module():
    return require("diffusers").QwenImageTransformer2DModel(**TINY)


@pytest.fixture(scope="module")
def module():
    return randomized(make_module())


@pytest.fixture(scope="module")
def folder(module, tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen_image")
    module.save_pretrained(path)
    return path


def inputs_of(grid, lengths=(9, 4), seed=1):
    """A text and its picture, and another text: what guidance has."""
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(len(lengths), grid[0] * grid[1], TINY["in_channels"], generator=generator)
    return patches, [torch.randn(length, TINY["joint_attention_dim"], generator=generator) for length in lengths]


def ours(network, patches, texts, grid, timestep=TIMESTEP):
    with torch.inference_mode():
        return network(patches, timestep, texts, grid)


@torch.no_grad()
def theirs(module, patches, texts, grid, timestep=TIMESTEP):
    """Each picture alone: diffusers pads and masks."""
    dtype = module.proj_out.weight.dtype
    velocities = [
        module(
            hidden_states=picture[None].to(dtype),
            encoder_hidden_states=text[None].to(dtype),
            timestep=torch.tensor([timestep / 1000]),
            img_shapes=[[(1, *grid)]],
        ).sample.float()
        for picture, text in zip(patches, texts, strict=True)
    ]
    return torch.cat(velocities)


@pytest.mark.parametrize("grid", GRIDS)
def test_velocity_is_that_of_diffusers(module, folder, grid):
    network = loaded(qwen_image.build, folder)
    patches, texts = inputs_of(grid)
    velocity = ours(network, patches, texts, grid)
    torch.testing.assert_close(velocity, theirs(module, patches, texts, grid), rtol=1e-4, atol=1e-4)


def test_both_backends_agree_with_diffusers(module, folder, each_backend):
    network = loaded(qwen_image.build, folder)
    patches, texts = inputs_of((3, 7))
    velocity = ours(network, patches, texts, (3, 7))
    torch.testing.assert_close(velocity, theirs(module, patches, texts, (3, 7)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_still", [False, True], ids=["at the timestep", "at 0"])
def test_references_are_read_as_diffusers_reads_them(is_still, tmp_path):
    """Two pictures to edit, beside each of two that are made."""
    module = randomized(require("diffusers").QwenImageTransformer2DModel(**TINY, zero_cond_t=is_still))
    module.save_pretrained(tmp_path)
    grid, grids = (3, 7), [(2, 5), (9, 1)]
    patches, texts = inputs_of(grid)
    read = torch.randn(19, TINY["in_channels"], generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = [
            module(
                hidden_states=torch.cat([picture, read])[None],
                encoder_hidden_states=text[None],
                timestep=torch.tensor([TIMESTEP / 1000]),
                img_shapes=[[(1, *grid), *((1, *one) for one in grids)]],
            ).sample[0, : len(picture)]
            for picture, text in zip(patches, texts, strict=True)
        ]
    network = loaded(qwen_image.build, tmp_path)
    with torch.inference_mode():
        found = network(patches, TIMESTEP, texts, grid, references=qwen_image.References(read, grids))
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_the_published_size_has_the_tensors_of_diffusers():
    with torch.device("meta"):
        module = require("diffusers").QwenImageTransformer2DModel()
    assert sources_of(qwen_image.build({})) == {name: tuple(value.shape) for name, value in module.state_dict().items()}


def test_bf16_is_as_close_to_the_truth_as_diffusers(module, folder):
    half = make_module()
    half.load_state_dict(module.state_dict())
    half = half.bfloat16().eval()
    network = loaded(qwen_image.build, folder, torch.bfloat16)
    our_errors, their_errors = [], []
    for seed in range(4):
        patches, texts = inputs_of((5, 6), seed=seed)
        truth = theirs(module, patches, texts, (5, 6))
        our_errors.append(ours(network, patches, texts, (5, 6)) - truth)
        their_errors.append(theirs(half, patches, texts, (5, 6)) - truth)
    assert rms(torch.cat(our_errors)) <= 1.25 * rms(torch.cat(their_errors))


def test_a_step_like_the_last_one_reuses_it(folder):
    network = loaded(qwen_image.build, folder)
    patches, texts = inputs_of((3, 7))
    cache = StepCache(0.1)

    def compute(patches):
        with torch.inference_mode():
            return network(patches, TIMESTEP, texts, (3, 7), cache)

    first = compute(patches)
    torch.testing.assert_close(compute(patches), first, rtol=1e-5, atol=1e-5)
    assert (cache.num_computed, cache.num_reused) == (1, 1)
    compute(-patches)
    assert (cache.num_computed, cache.num_reused) == (2, 1)


@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_compute_what_one_does(folder, size, dtype):
    grid = (3, 7)
    patches, texts = inputs_of(grid)
    alone = ours(loaded(qwen_image.build, folder, dtype), patches, texts, grid)
    split = loaded_on_ranks(size, qwen_image.build, folder, lambda network: ours(network, patches, texts, grid), dtype)
    for velocity in split:
        assert torch.equal(velocity, split[0])
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(split[0], alone, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("key", ["use_additional_t_cond", "use_layer3d_rope", "guidance_embeds"])
def test_what_is_not_built_is_refused_by_name(key):
    with pytest.raises(UnsupportedConfig, match=key):
        QwenImageConfig.from_dict({**TINY, key: True})


def test_axes_that_do_not_fill_a_head_are_refused():
    with pytest.raises(UnsupportedConfig, match=r"axes_dims_rope \(4, 6, 8\)"):
        QwenImageConfig.from_dict({**TINY, "axes_dims_rope": (4, 6, 8)})


def test_texts_beyond_the_last_position_are_refused(folder):
    network = loaded(qwen_image.build, folder)
    patches, texts = inputs_of((2, 2), lengths=(4096,))
    with pytest.raises(RequestError, match="positions up to 4097"):
        ours(network, patches, texts, (2, 2))
