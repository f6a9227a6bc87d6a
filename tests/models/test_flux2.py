"""The transformer of FLUX.2 klein against diffusers, on a tiny random checkpoint."""

import pytest
import torch
from components import loaded, loaded_on_ranks, randomized, relative, rms, sources_of
from oracle import require

from tilewright.models import flux2
from tilewright.models.flux import grid_positions
from tilewright.ops import backend
from tilewright.types import UnsupportedConfig

SIZES = {
    "in_channels": 12,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 20,
    "timestep_guidance_channels": 32,
    "mlp_ratio": 2.5,
    "axes_dims_rope": [4, 4, 4, 4],
    "guidance_embeds": False,
}
TIMESTEP = 731.25
ROUND_TIMESTEP = 500.0  # exact in bf16, to which diffusers rounds it: its error is then that of its products, as ours
ROWS, COLUMNS, NUM_TEXT = 3, 5, 9


@pytest.fixture(scope="module")
def transformer(tmp_path_factory):
    """diffusers' transformer and its saved checkpoint."""
    diffusers = require("diffusers")
    model = randomized(diffusers.Flux2Transformer2DModel(**SIZES))
    folder = tmp_path_factory.mktemp("flux2")
    model.save_pretrained(folder)
    return model, folder


def inputs(batch_size):
    """Tokens, positions and text. Those of a reference picture lie behind those of the picture, ten pictures later."""
    generator = torch.Generator().manual_seed(3)
    positions = torch.cat([grid_positions(0, ROWS, COLUMNS), grid_positions(10, 2, 4)], dim=1)
    tokens = torch.randn(batch_size, positions.shape[1], SIZES["in_channels"], generator=generator)
    return tokens, positions, torch.randn(batch_size, NUM_TEXT, SIZES["joint_attention_dim"], generator=generator)


@torch.no_grad()
def expected(model, tokens, positions, text, timestep=TIMESTEP):
    zeros = torch.zeros(1, NUM_TEXT, dtype=torch.int64)
    return model(
        tokens.to(model.dtype),
        encoder_hidden_states=text.to(model.dtype),
        timestep=torch.full((len(tokens),), timestep / 1000),
        img_ids=torch.cat([positions, torch.zeros_like(positions[:1])]).t(),
        txt_ids=torch.cat([zeros, zeros, zeros, torch.arange(NUM_TEXT)[None]]).t(),
    ).sample.float()


def computed(network, tokens, positions, text, timestep=TIMESTEP):
    return network(tokens, timestep, text, network.layout(NUM_TEXT, positions, len(tokens)))


@pytest.mark.parametrize("batch_size", [1, 2])
def test_fp32_velocities_are_those_of_diffusers(batch_size, transformer):
    model, folder = transformer
    ours = computed(loaded(flux2.build, folder), *inputs(batch_size))
    assert relative(ours, expected(model, *inputs(batch_size))) < 1e-4


def test_the_torch_backend_gives_the_same(transformer):
    model, folder = transformer
    with backend.use("torch"):
        ours = computed(loaded(flux2.build, folder), *inputs(2))
    assert relative(ours, expected(model, *inputs(2))) < 1e-4


def test_bf16_is_as_close_to_the_truth_as_diffusers(transformer):
    model, folder = transformer
    given = *inputs(2), ROUND_TIMESTEP
    truth = expected(model, *given)
    half = type(model).from_pretrained(folder, dtype=torch.bfloat16).eval()
    ours = computed(loaded(flux2.build, folder, torch.bfloat16), *given)
    ratio = rms(ours - truth) / rms(expected(half, *given) - truth)
    assert ratio <= 1.25


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_give_what_one_does(size, transformer):
    """Three have a head each; two, two, of which one is padding."""
    _, folder = transformer
    alone = computed(loaded(flux2.build, folder), *inputs(2))
    for ours in loaded_on_ranks(size, flux2.build, folder, lambda network: computed(network, *inputs(2))):
        assert relative(ours, alone) < 1e-5


# Of klein with 4 and with 9 billion weights.
PUBLISHED = [
    {"num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680},
    {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288},
]


@pytest.mark.parametrize("sizes", PUBLISHED)
def test_published_sizes_have_the_tensors_of_diffusers(sizes):
    with torch.device("meta"):
        model = require("diffusers").Flux2Transformer2DModel(**sizes, guidance_embeds=False)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    config = {key: value for key, value in model.config.items() if value is not None}
    assert sources_of(flux2.build(config)) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"guidance_embeds": True}, "guidance_embeds true, expected false"),
        ({"patch_size": 2}, "patch_size 2, expected 1"),
        ({"axes_dims_rope": [8, 4, 4]}, "expected 4 even numbers"),
        ({"mlp_ratio": "wide"}, "mlp_ratio 'wide'"),
    ],
)
def test_other_configs_are_refused(change, message):
    with pytest.raises(UnsupportedConfig, match=message):
        flux2.build({**SIZES, **change})
