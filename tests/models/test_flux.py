"""The transformer of FLUX.1 against diffusers, on tiny random checkpoints."""

import functools

import pytest
import torch
from components import loaded, loaded_on_ranks, randomized, relative, rms, sources_of
from oracle import require

from tilewright.models import flux
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
    "pooled_projection_dim": 24,
    "axes_dims_rope": [4, 6, 6],
}
KINDS = {"schnell": False, "dev": True}
TIMESTEP, GUIDANCE = 731.25, 3.6
# These are exact in bf16, to which diffusers rounds them: its error is then that of its products, as ours is.
ROUND_TIMESTEP, ROUND_GUIDANCE = 500.0, 4.0
ROWS, COLUMNS, NUM_TEXT = 3, 5, 9


@pytest.fixture(scope="module")
def transformers(tmp_path_factory):
    """diffusers' transformer and its saved checkpoint, by kind."""
    diffusers = require("diffusers")

    @functools.cache
    def transformer(kind):
        model = randomized(diffusers.FluxTransformer2DModel(**SIZES, guidance_embeds=KINDS[kind]))
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        return model, folder

    return transformer


def inputs(batch_size, has_reference=False):
    """Tokens, positions and text; a reference picture's tokens lie behind those of the picture."""
    generator = torch.Generator().manual_seed(3)
    positions = grid_positions(0, ROWS, COLUMNS)
    if has_reference:
        positions = torch.cat([positions, grid_positions(1, 2, 4)], dim=1)
    tokens = torch.randn(batch_size, positions.shape[1], SIZES["in_channels"], generator=generator)
    states = torch.randn(batch_size, NUM_TEXT, SIZES["joint_attention_dim"], generator=generator)
    pooled = torch.randn(batch_size, SIZES["pooled_projection_dim"], generator=generator)
    return tokens, positions, flux.FluxText(states, pooled)


@torch.no_grad()
def expected(model, tokens, positions, text, timestep=TIMESTEP, guidance=GUIDANCE):
    dtype, batch_size = model.dtype, len(tokens)
    return model(
        tokens.to(dtype),
        encoder_hidden_states=text.states.to(dtype),
        pooled_projections=text.pooled.to(dtype),
        timestep=torch.full((batch_size,), timestep / 1000),
        img_ids=positions.t(),
        txt_ids=torch.zeros(text.states.shape[1], 3),
        guidance=torch.full((batch_size,), guidance) if model.config.guidance_embeds else None,
    ).sample.float()


def computed(network, tokens, positions, text, timestep=TIMESTEP, guidance=GUIDANCE):
    layout = network.layout(text.states.shape[1], positions, len(tokens))
    return network(tokens, timestep, text, layout, guidance if network.config.is_told_guidance else None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_fp32_velocities_are_those_of_diffusers(kind, batch_size, transformers):
    model, folder = transformers(kind)
    given = inputs(batch_size, has_reference=kind == "dev")
    assert relative(computed(loaded(flux.build, folder), *given), expected(model, *given)) < 1e-4


def test_the_torch_backend_gives_the_same(transformers):
    model, folder = transformers("dev")
    with backend.use("torch"):
        ours = computed(loaded(flux.build, folder), *inputs(2))
    assert relative(ours, expected(model, *inputs(2))) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_as_close_to_the_truth_as_diffusers(kind, transformers):
    model, folder = transformers(kind)
    given = *inputs(2), ROUND_TIMESTEP, ROUND_GUIDANCE
    truth = expected(model, *given)
    half = type(model).from_pretrained(folder, dtype=torch.bfloat16).eval()
    ours = computed(loaded(flux.build, folder, torch.bfloat16), *given)
    ratio = rms(ours - truth) / rms(expected(half, *given) - truth)
    assert ratio <= 1.25


def test_two_ranks_give_what_one_does(transformers):
    _, folder = transformers("dev")
    alone = computed(loaded(flux.build, folder), *inputs(2))
    for ours in loaded_on_ranks(2, flux.build, folder, lambda network: computed(network, *inputs(2))):
        assert relative(ours, alone) < 1e-5


def test_published_sizes_have_the_tensors_of_diffusers():
    with torch.device("meta"):
        model = require("diffusers").FluxTransformer2DModel(guidance_embeds=True)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    config = {key: value for key, value in model.config.items() if value is not None}
    assert sources_of(flux.build(config)) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 2}, "patch_size 2, expected 1"),
        ({"axes_dims_rope": [4, 6]}, r"axes_dims_rope \[4, 6\], expected 3 even numbers"),
        ({"axes_dims_rope": [4, 4, 4]}, "add up to attention_head_dim, 16"),
        ({"num_layers": None}, "num_layers None"),
    ],
)
def test_other_configs_are_refused(change, message):
    with pytest.raises(UnsupportedConfig, match=message):
        flux.build({**SIZES, **change})
