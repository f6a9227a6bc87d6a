"""Wan's autoencoders (2.1, 2.2) and Qwen-Image's against diffusers, on tiny random checkpoints."""

import pytest
import tiny_vae
import torch
from tiny_vae import channels_last, rand, relative, rms
from torch_bf16 import quick_products

from tilewright.host import memory
from tilewright.models.autoencoder_wan import model
from tilewright.models.autoencoder_wan.blocks import MIN_SIDE, chosen_side, in_tiles
from tilewright.models.autoencoder_wan.model import patchify, unpatchify
from tilewright.models.registry import build_vae
from tilewright.ops import backend
from tilewright.types import RequestError, UnsupportedConfig

WAN21 = {
    "class_name": "AutoencoderKLWan",
    "base_dim": 16,
    "z_dim": 4,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "latents_mean": [0.1, -0.2, 0.3, 0.0],
    "latents_std": [1.5, 0.5, 2.0, 1.0],
}
WAN22 = WAN21 | {
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "dim_mult": [1, 2, 2, 2],
    "num_res_blocks": 2,
    "decoder_base_dim": 24,
    "temperal_downsample": [False, True, True],
}
QWEN = WAN21 | {
    "class_name": "AutoencoderKLQwenImage",
    "dim_mult": [1, 2, 4, 4],
    "temperal_downsample": [False, True, True],
    "base_dim": 8,
}
FAMILIES = {"wan21": WAN21, "wan22": WAN22, "qwen": QWEN}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return tiny_vae.checkpoints_of(FAMILIES, tmp_path_factory)


def statistics(network):
    config = network.config
    return (torch.tensor(values)[:, None, None, None] for values in (config.latents_mean, config.latents_std))


@torch.no_grad()
@quick_products()
def expected_decode(network, latents):
    mean, std = statistics(network)
    dtype = next(network.parameters()).dtype
    return channels_last(network.decode((latents * std + mean).to(dtype)).sample)


@torch.no_grad()
@quick_products()
def expected_encode(network, x):
    mean, std = statistics(network)
    dtype = next(network.parameters()).dtype
    return channels_last((network.encode(x.to(dtype)).latent_dist.mode().float() - mean) / std)


def close(actual, expected):
    assert actual.shape == expected.shape
    assert relative(actual, expected) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_frames", [1, 2, 3, 4])
def test_decode(checkpoints, family, num_frames):
    network, folder = checkpoints(family)
    vae = tiny_vae.ours(folder)
    latents = 0.3 * rand(2 if num_frames < 3 else 1, 4, num_frames, 3, 5)
    actual = vae.decode(channels_last(latents))
    assert actual.shape[1] == 1 + vae.temporal_factor * (num_frames - 1)
    assert actual.shape[2:] == (3 * vae.spatial_factor, 5 * vae.spatial_factor, 3)
    expected = expected_decode(network, latents)
    assert (expected.abs() < 1).float().mean() > 0.5  # or there is little to compare but what is clamped
    close(actual, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_frames", [1, 5, 9, 13])
def test_encode(checkpoints, family, num_frames):
    network, folder = checkpoints(family)
    vae = tiny_vae.ours(folder)
    step = vae.spatial_factor
    x = rand(2 if num_frames < 9 else 1, 3, num_frames, 2 * step, 3 * step).clamp(-1, 1)
    close(vae.encode(channels_last(x)), expected_encode(network, x))


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_exact_as_theirs(checkpoints, family):
    network, folder = checkpoints(family)
    vae = tiny_vae.ours(folder, torch.bfloat16)
    latents = 0.3 * rand(1, 4, 3, 4, 4)
    side = 8 * vae.spatial_factor  # 512 values: the errors of a few dozen say little about either side
    x = rand(1, 3, 5, side, side).clamp(-1, 1)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_the_torch_backend_agrees(checkpoints, family):
    folder = checkpoints(family)[1]
    vae = tiny_vae.ours(folder)
    latents = 0.3 * rand(1, 3, 2, 2, 4)
    clip = vae.decode(latents)
    encoded = vae.encode(clip)
    with backend.use("torch"):
        twin = tiny_vae.ours(folder)
        close(twin.decode(latents), clip)
        close(twin.encode(clip), encoded)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(2, 1, 19, 2), (1, 2, 2, 19)], ids=str)
def test_in_tiles(checkpoints, family, shape):
    """Bit for bit, everywhere: each tile sees as much around it as its pixels do in the whole."""
    vae = tiny_vae.ours(checkpoints(family)[1])
    latents = 0.3 * rand(*shape, 4)
    clip = vae.decode(latents)
    assert torch.equal(vae.decode(latents, tile=5 * vae.spatial_factor), clip)
    assert torch.equal(vae.encode(clip, tile=9 * vae.spatial_factor), vae.encode(clip))


def test_a_tile_that_sees_too_little_differs(checkpoints, monkeypatch):
    """By what the reach is short of: it is as small as it can be, or nearly."""
    vae = tiny_vae.ours(checkpoints("wan21")[1])
    latents = 0.3 * rand(1, 1, 18, 9, 4)
    clip = vae.decode(latents)
    assert torch.equal(vae.decode(latents, tile=32), clip)
    reach = vae.decoder.reach()
    monkeypatch.setattr(vae.decoder, "reach", lambda: reach - 1)
    assert not torch.equal(vae.decode(latents, tile=32), clip)


def test_tiles_where_memory_asks_for_them(checkpoints, monkeypatch):
    vae = tiny_vae.ours(checkpoints("wan21")[1])
    latents = 0.3 * rand(1, 2, 33, 4, 4)
    clip = vae.decode(latents)
    sides = []
    monkeypatch.setattr(
        model, "in_tiles", lambda *args, side, **rest: sides.append(side) or in_tiles(*args, side=side, **rest)
    )
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 40)
    vae.decode(latents)
    assert not sides
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 20)
    assert torch.equal(vae.decode(latents), clip)
    assert sides == [MIN_SIDE // 2]


def test_the_side_of_tiles(monkeypatch):
    """Half of what is free holds the maps, and the frames that convolutions keep, of a tile and what it sees."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 8 << 30)
    settings = {
        "batch": 1,
        "widths": (96, 192, 384, 384),
        "num_resnets": 3,
        "num_frames": 4,
        "reach": 48,
        "itemsize": 2,
    }
    assert chosen_side(480 * 832, **settings) is None
    side = chosen_side(1080 * 1920, **settings)
    pixel_bytes = 2 * (3 * 4 * 96 + 12 * (96 + 192 / 4 + 384 / 16 + 384 / 64))
    assert (side + 2 * 48) ** 2 * pixel_bytes <= 4 << 30 < (side + 32 + 2 * 48) ** 2 * pixel_bytes


def test_a_clip_of_a_batch_is_that_clip_alone(checkpoints):
    vae = tiny_vae.ours(checkpoints("wan22")[1])
    latents = 0.3 * rand(3, 2, 2, 3, 4)
    assert torch.equal(vae.decode(latents)[1:2], vae.decode(latents[1:2]))


def test_patches():
    x = rand(2, 3, 4, 6, 3)
    patches = patchify(x, 2)
    assert patches.shape == (2, 3, 2, 3, 12)
    assert torch.equal(unpatchify(patches, 2), x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_scales": [0.5]}, r"config has attn_scales \[0.5\], expected none"),
        ({"temperal_downsample": [True]}, "config has 1 temperal_downsample, expected 2, one less than dim_mult"),
        ({"z_dim": 8}, "config has 4 latents_mean, expected 8, its z_dim"),
        ({"dim_mult": "1, 2"}, "config has dim_mult '1, 2', expected a list"),
    ],
)
def test_configs_that_are_not_built(change, message):
    config = {key: value for key, value in WAN21.items() if key != "class_name"}
    with pytest.raises(UnsupportedConfig, match=message):
        build_vae({"_class_name": "AutoencoderKLWan", **config, **change})


def test_wrong_shapes(checkpoints):
    vae = tiny_vae.ours(checkpoints("wan21")[1])
    with pytest.raises(RequestError, match="the clip to encode has 4 frames, expected 1 more than a multiple of 4"):
        vae.encode(torch.zeros(1, 4, 8, 8, 3))
    with pytest.raises(RequestError, match="the clip to encode is 10 x 8 pixels, expected multiples of 4"):
        vae.encode(torch.zeros(1, 1, 8, 10, 3))
    with pytest.raises(RequestError, match="tile is 0, expected 1 pixel or more"):
        vae.decode(torch.zeros(1, 1, 4, 4, 4), tile=0)
