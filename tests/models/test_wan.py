"""The transformer of Wan against diffusers, on a tiny random config."""

import pytest
import torch
from components import loaded, loaded_on_ranks, randomized, rms, sources_of
from oracle import require

from tilewright.layers.memory import StepCache
from tilewright.models import wan
from tilewright.models.wan import WanConfig
from tilewright.types import RequestError, UnsupportedConfig

TINY = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 5,
    "out_channels": 5,
    "text_dim": 24,
    "freq_dim": 32,
    "ffn_dim": 80,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
_SHARED = {"attention_head_dim": 128, "text_dim": 4096, "freq_dim": 256, "num_layers": 30, "image_dim": None}
PUBLISHED = [  # Wan 2.1 1.3B and Wan 2.2 TI2V-5B
    {**_SHARED, "num_attention_heads": 12, "ffn_dim": 8960, "in_channels": 16, "out_channels": 16},
    {**_SHARED, "num_attention_heads": 24, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48},
]
# A still, odd numbers of patches, and several frames: latent frames, rows, columns.
GRIDS = [(1, 4, 6), (3, 10, 2), (4, 6, 6)]


@pytest.fixture(scope="module")
def module():
    return randomized(require("diffusers").WanTransformer3DModel(**TINY))


@pytest.fixture(scope="module")
def folder(module, tmp_path_factory):
    path = tmp_path_factory.mktemp("wan")
    module.save_pretrained(path)
    return path


def inputs_of(grid, batch=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(batch, TINY["in_channels"], *grid, generator=generator)
    text = torch.randn(batch, 12, TINY["text_dim"], generator=generator)
    text[1, 7:] = 0
    return latents, text


def channels_last(latents):
    return latents.permute(0, 2, 3, 4, 1).contiguous()


def ours(network, latents, timesteps, text):
    with torch.inference_mode():
        velocity = network(channels_last(latents), timesteps, network.embed_text(list(text)))
    return velocity.permute(0, 4, 1, 2, 3)


@torch.no_grad()
def theirs(module, latents, timesteps, text):
    if timesteps.dim() == 2:  # diffusers has a timestep for each patch
        patches = latents.shape[3] * latents.shape[4] // 4
        timesteps = timesteps.repeat_interleave(patches, dim=1)
    dtype = module.proj_out.weight.dtype
    return module(latents.to(dtype), timesteps, text.to(dtype)).sample.float()


@pytest.mark.parametrize("grid", GRIDS)
def test_velocity_is_that_of_diffusers(module, folder, grid):
    network = loaded(wan.build, folder)
    latents, text = inputs_of(grid)
    timesteps = torch.tensor([999.0, 40.0])
    velocity = ours(network, latents, timesteps, text)
    torch.testing.assert_close(velocity, theirs(module, latents, timesteps, text), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grid", GRIDS)
def test_frames_with_timesteps_of_their_own(module, folder, grid):
    """TI2V: the frame that is given stands at 0."""
    network = loaded(wan.build, folder)
    latents, text = inputs_of(grid)
    timesteps = torch.full((2, grid[0]), 700.0)
    timesteps[:, 0] = 0
    velocity = ours(network, latents, timesteps, text)
    torch.testing.assert_close(velocity, theirs(module, latents, timesteps, text), rtol=1e-4, atol=1e-4)


def test_both_backends_agree_with_diffusers(module, folder, each_backend):
    network = loaded(wan.build, folder)
    latents, text = inputs_of((3, 10, 2))
    timesteps = torch.tensor([[0.0, 500.0, 500.0], [999.0, 999.0, 999.0]])
    velocity = ours(network, latents, timesteps, text)
    torch.testing.assert_close(velocity, theirs(module, latents, timesteps, text), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", PUBLISHED, ids=lambda config: f"{config['num_attention_heads']}_heads")
def test_published_sizes_have_the_tensors_of_diffusers(config):
    with torch.device("meta"):
        module = require("diffusers").WanTransformer3DModel(**config)
    assert sources_of(wan.build(config)) == {name: tuple(value.shape) for name, value in module.state_dict().items()}


def test_bf16_is_as_close_to_the_truth_as_diffusers(module, folder):
    diffusers = require("diffusers")
    half = diffusers.WanTransformer3DModel(**TINY)
    half.load_state_dict(module.state_dict())
    half = in_bf16(half)
    network = loaded(wan.build, folder, torch.bfloat16)
    our_errors, their_errors = [], []
    for seed in range(6):
        latents, text = inputs_of((3, 10, 6), seed=seed)
        timesteps = torch.tensor([900.0, 900.0 - 150 * seed])
        truth = theirs(module, latents, timesteps, text)
        our_errors.append(ours(network, latents, timesteps, text) - truth)
        their_errors.append(theirs(half, latents, timesteps, text) - truth)
    assert rms(torch.cat(our_errors)) <= 1.25 * rms(torch.cat(their_errors))


def in_bf16(module):
    """As diffusers loads it: what the class names stays in fp32."""
    for name, value in module.named_parameters():
        if not any(part in name.split(".") for part in module._keep_in_fp32_modules):
            value.data = value.data.bfloat16()
    return module.eval()


def test_videos_share_a_text(folder):
    """Two videos of each of two texts are those of one at a time."""
    network = loaded(wan.build, folder)
    latents, text = inputs_of((2, 4, 6), batch=4)
    timesteps = torch.full((4,), 500.0)
    together = ours(network, latents, timesteps, text[:2])
    for i in range(4):
        alone = ours(network, latents[i : i + 1], timesteps[:1], text[i // 2 : i // 2 + 1])
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-5, atol=1e-5)


def test_a_step_like_the_last_one_reuses_it(folder):
    network = loaded(wan.build, folder)
    latents, text = inputs_of((3, 4, 6))
    timesteps = torch.tensor([700.0, 700.0])
    cache = StepCache(0.1)

    def compute(latents):
        with torch.inference_mode():
            return network(channels_last(latents), timesteps, network.embed_text(list(text)), cache)

    first = compute(latents)
    torch.testing.assert_close(compute(latents), first, rtol=1e-5, atol=1e-5)
    assert (cache.num_computed, cache.num_reused) == (1, 1)
    compute(-latents)
    assert (cache.num_computed, cache.num_reused) == (2, 1)


@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_compute_what_one_does(folder, size, dtype):
    """Also three, which neither heads nor widths divide by."""
    latents, text = inputs_of((3, 10, 6))
    timesteps = torch.tensor([900.0, 300.0])
    alone = ours(loaded(wan.build, folder, dtype), latents, timesteps, text)
    split = loaded_on_ranks(size, wan.build, folder, lambda network: ours(network, latents, timesteps, text), dtype)
    for velocity in split:
        assert torch.equal(velocity, split[0])
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(split[0], alone, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "change",
    [{"image_dim": 1280}, {"added_kv_proj_dim": 64}, {"qk_norm": "rms_norm"}, {"cross_attn_norm": False}],
    ids=lambda change: next(iter(change)),
)
def test_what_is_not_built_is_refused_by_name(change):
    with pytest.raises(UnsupportedConfig, match=next(iter(change))):
        WanConfig.from_dict({**TINY, **change})


def test_more_patches_than_positions_are_refused(folder):
    network = loaded(wan.build, folder)
    latents, text = inputs_of((1, 2, 66))
    with pytest.raises(RequestError, match="1 x 1 x 33 patches"):
        ours(network, latents, torch.tensor([5.0, 5.0]), text)
