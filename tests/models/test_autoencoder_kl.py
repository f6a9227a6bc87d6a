"""AutoencoderKL and FLUX.2's against diffusers, on tiny random checkpoints."""

import pytest
import tiny_vae
import torch
from tiny_vae import channels_last, rand, relative, rms
from torch_bf16 import quick_products

from tilewright.host import memory as host_memory
from tilewright.layers.memory import FeatureMemory
from tilewright.models import autoencoder_kl
from tilewright.models.autoencoder_kl import patchify, unpatchify
from tilewright.models.registry import build_vae
from tilewright.ops import backend
from tilewright.types import RequestError, UnsupportedConfig


def blocks(count):
    return {"down_block_types": ("DownEncoderBlock2D",) * count, "up_block_types": ("UpDecoderBlock2D",) * count}


FLUX = dict(
    class_name="AutoencoderKL",
    latent_channels=16,
    block_out_channels=(32, 64, 64),
    layers_per_block=2,
    norm_num_groups=8,
    scaling_factor=0.3611,
    shift_factor=0.1159,
    use_quant_conv=False,
    use_post_quant_conv=False,
    **blocks(3),
)
STABLE_DIFFUSION = dict(
    class_name="AutoencoderKL",
    latent_channels=4,
    block_out_channels=(24, 40),
    layers_per_block=1,
    norm_num_groups=4,
    **blocks(2),
)
WITHOUT_ATTENTION = STABLE_DIFFUSION | dict(mid_block_add_attention=False, block_out_channels=(8,), **blocks(1))
FLUX2 = dict(
    class_name="AutoencoderKLFlux2",
    latent_channels=4,
    block_out_channels=(16, 32),
    decoder_block_out_channels=(24, 40),
    layers_per_block=1,
    norm_num_groups=4,
    **blocks(2),
)
FAMILIES = {"flux": FLUX, "sd": STABLE_DIFFUSION, "plain": WITHOUT_ATTENTION, "flux2": FLUX2}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return tiny_vae.checkpoints_of(FAMILIES, tmp_path_factory)


def scaled(network, z):
    """What pipelines of diffusers make of the encoder's z [B, C, h, w] for the transformer."""
    config = network.config
    if hasattr(network, "bn"):
        mean, var = network.bn.running_mean, network.bn.running_var
        z = patchify(z.movedim(1, -1), 2).movedim(-1, 1)
        return (z - mean[:, None, None]) / torch.sqrt(var + config.batch_norm_eps)[:, None, None]
    return (z - (config.shift_factor or 0)) * config.scaling_factor


def restored(network, latents):
    config = network.config
    if hasattr(network, "bn"):
        mean, var = network.bn.running_mean, network.bn.running_var
        z = latents * torch.sqrt(var + config.batch_norm_eps)[:, None, None] + mean[:, None, None]
        return unpatchify(z.movedim(1, -1), 2).movedim(-1, 1)
    return latents / config.scaling_factor + (config.shift_factor or 0)


@torch.no_grad()
@quick_products()
def expected_decode(network, latents):
    dtype = next(network.parameters()).dtype
    return channels_last(network.decode(restored(network, latents).to(dtype)).sample)


@torch.no_grad()
@quick_products()
def expected_encode(network, x):
    dtype = next(network.parameters()).dtype
    return channels_last(scaled(network, network.encode(x.to(dtype)).latent_dist.mode().float()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [(2, 4, 6), (1, 9, 5)], ids=str)
def test_decode(checkpoints, isa, family, size):
    network, folder = checkpoints(family)
    vae = tiny_vae.ours(folder)
    batch, height, width = size
    latents = rand(batch, vae.latent_channels, height, width)
    actual = vae.decode(channels_last(latents))
    expected = expected_decode(network, latents)
    assert actual.shape == expected.shape == (batch, 1, height * vae.spatial_factor, width * vae.spatial_factor, 3)
    assert relative(actual, expected) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [(2, 16, 24), (1, 12, 44)], ids=str)
def test_encode(checkpoints, family, size):
    network, folder = checkpoints(family)
    x = rand(size[0], 3, *size[1:]).clamp(-1, 1)
    actual, expected = tiny_vae.ours(folder).encode(channels_last(x)), expected_encode(network, x)
    assert actual.shape == expected.shape
    assert relative(actual, expected) < 1e-4


def test_sizes_that_do_not_divide(checkpoints):
    """The last row and column are left out at each halving, as diffusers does."""
    network, folder = checkpoints("flux")
    x = rand(1, 3, 23, 30)
    assert relative(tiny_vae.ours(folder).encode(channels_last(x)), expected_encode(network, x)) < 1e-4


@pytest.mark.parametrize("family", ["flux", "flux2"])
def test_frames_are_pictures(checkpoints, family):
    vae = tiny_vae.ours(checkpoints(family)[1])
    latents = rand(2, 3, 4, 4, vae.latent_channels)
    clips = vae.decode(latents)
    assert clips.shape[:2] == (2, 3)
    assert torch.equal(clips[1, 2], vae.decode(latents[1:, 2:])[0, 0])
    assert torch.equal(vae.encode(clips)[1, 2], vae.encode(clips[1:, 2:])[0, 0])


@pytest.mark.parametrize("family", ["flux", "flux2"])
def test_bf16_is_as_exact_as_theirs(checkpoints, family):
    network, folder = checkpoints(family)
    vae = tiny_vae.ours(folder, torch.bfloat16)
    latents = rand(2, vae.latent_channels, 6, 7)
    x = rand(2, 3, 24, 28).clamp(-1, 1)
    exact = expected_decode(network, latents), expected_encode(network, x)
    try:
        network.bfloat16()
        theirs = expected_decode(network, latents), expected_encode(network, x)
    finally:
        network.float()
        network.load_state_dict(tiny_vae.oracle(**FAMILIES[family]).state_dict())
    actual = vae.decode(channels_last(latents)), vae.encode(channels_last(x))
    for name, ours, their, truth in zip(("decode", "encode"), actual, theirs, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert rms(ours.float() - truth) <= 1.25 * rms(their.float() - truth), name


@pytest.mark.parametrize("tile", [1, 6, 16, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_bands(checkpoints, family, tile):
    """Everywhere, not between the bands alone: they share the statistics of the whole picture."""
    vae = tiny_vae.ours(checkpoints(family)[1])
    latents = rand(2, 1, 9, 5, vae.latent_channels)
    assert (vae.decode(latents, tile=tile) - vae.decode(latents)).abs().max() < 1e-5


def test_bands_where_memory_asks_for_them(checkpoints, monkeypatch):
    vae = tiny_vae.ours(checkpoints("flux")[1])
    monkeypatch.setattr(autoencoder_kl, "BAND_ROWS", 8)
    latents, peaks = rand(1, 1, 16, 16, 16), []
    for free_bytes in (1 << 40, 0):
        monkeypatch.setattr(host_memory, "available_bytes", lambda free_bytes=free_bytes: free_bytes)
        memory = FeatureMemory()
        monkeypatch.setattr(autoencoder_kl, "FeatureMemory", lambda memory=memory: memory)
        vae.decode(latents)
        peaks.append(memory.peak_bytes)
    # 64 + 32 + 32 channels of the picture's size, then 32 + 32 beside a quarter of 64 and the band.
    picture_bytes = 4 * 64 * 64
    assert peaks[0] == 128 * picture_bytes
    assert peaks[1] < 100 * picture_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_the_torch_backend_agrees(checkpoints, family):
    folder = checkpoints(family)[1]
    vae = tiny_vae.ours(folder)
    latents = rand(1, 1, 4, 6, vae.latent_channels)
    pictures = vae.decode(latents)
    encoded = vae.encode(pictures)
    with backend.use("torch"):
        twin = tiny_vae.ours(folder)
        assert relative(twin.decode(latents), pictures) < 1e-4
        assert relative(twin.encode(pictures), encoded) < 1e-4


def test_packed_weights_come_back_from_the_cache(checkpoints, tmp_path):
    folder = checkpoints("flux")[1]
    latents = rand(1, 1, 4, 6, 16)
    pictures = [tiny_vae.ours(folder, cache_dir=tmp_path).decode(latents) for _ in range(2)]
    assert torch.equal(*pictures)
    assert any(tmp_path.rglob("*"))


def test_old_names_of_attention(checkpoints):
    vae = tiny_vae.ours(checkpoints("sd")[1])
    name = "decoder.mid_block.attentions.0"
    assert vae.checkpoint_name(f"{name}.query.weight") == f"{name}.to_q.weight"
    assert vae.checkpoint_name(f"{name}.proj_attn.bias") == f"{name}.to_out.0.bias"
    assert vae.checkpoint_name(f"{name}.to_out.0.bias") == f"{name}.to_out.0.bias"


def test_statistics_per_channel(checkpoints):
    """As Playground's checkpoint has them beside a scaling factor."""
    mean, std = [0.1, -0.2, 0.3, 0.4], [1.5, 0.5, 2.0, 1.0]
    config = {key: value for key, value in STABLE_DIFFUSION.items() if key != "class_name"}
    vae = build_vae({"_class_name": "AutoencoderKL", **config, "latents_mean": mean, "latents_std": std})
    z = vae.config.scale.restore(torch.ones(4))
    assert torch.allclose(z, torch.tensor(std) / 0.18215 + torch.tensor(mean))
    assert torch.allclose(vae.config.scale.normalize(z), torch.ones(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": "AutoencoderTiny"}, "_class_name of the vae is 'AutoencoderTiny', expected one of"),
        (
            {"down_block_types": ["DownEncoderBlock2D", "AttnDownEncoderBlock2D"]},
            "config has 'AttnDownEncoderBlock2D' in down_block_types, expected DownEncoderBlock2D",
        ),
        ({"up_block_types": ["UpDecoderBlock2D"]}, "config has 1 up_block_types, expected 2"),
        ({"act_fn": "relu"}, "config has act_fn 'relu', expected silu"),
        ({"norm_num_groups": 32}, "config has norm_num_groups 32, expected a divisor of its block_out_channels, 24"),
        ({"latents_mean": [1.0], "latents_std": [1.0]}, "config has latents_mean .*, expected 4 numbers"),
    ],
)
def test_configs_that_are_not_built(change, message):
    config = {key: value for key, value in STABLE_DIFFUSION.items() if key != "class_name"}
    with pytest.raises(UnsupportedConfig, match=message):
        build_vae({"_class_name": "AutoencoderKL", **config, **change})


def test_wrong_shapes(checkpoints):
    vae = tiny_vae.ours(checkpoints("flux")[1])
    with pytest.raises(RequestError, match=r"latents has shape \[1, 4, 4, 16\], expected \[B, T, H, W, 16\]"):
        vae.decode(torch.zeros(1, 4, 4, 16))
    with pytest.raises(RequestError, match=r"the image to encode has shape \[1, 1, 8, 8, 4\], expected"):
        vae.encode(torch.zeros(1, 1, 8, 8, 4))
    with pytest.raises(RequestError, match="tile is 0, expected 1 pixel or more"):
        vae.decode(torch.zeros(1, 1, 4, 4, 16), tile=0)
