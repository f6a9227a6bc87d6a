"""The encoders of T5 and UMT5 against transformers, on tiny random checkpoints."""

import functools

import pytest
import torch
from components import loaded, loaded_on_ranks, randomized, relative, rms, sources_of
from oracle import require

from tilewright.models.text_encoders import t5
from tilewright.ops import backend
from tilewright.types import UnsupportedConfig

SIZES = {
    "vocab_size": 99,
    "d_model": 40,
    "d_ff": 72,
    "d_kv": 24,
    "num_layers": 3,
    "num_heads": 5,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 24,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.0,
}
LENGTHS = (70, 1, 9)  # the first passes the largest distance that has a bias of its own


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """transformers' encoder and its saved checkpoint, by kind."""
    transformers = require("transformers")

    @functools.cache
    def encoder(kind):
        config = {"t5": transformers.T5Config, "umt5": transformers.UMT5Config}[kind](**SIZES)
        model = {"t5": transformers.T5EncoderModel, "umt5": transformers.UMT5EncoderModel}[kind](config)
        folder = tmp_path_factory.mktemp(kind)
        randomized(model).save_pretrained(folder)
        return model, folder

    return encoder


def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 99, (length,), generator=generator).tolist() for length in LENGTHS]


@torch.no_grad()
def expected(model, prompts):
    """Of prompts padded to one length, with the padding masked."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    mask = torch.tensor([[1] * len(prompt) + [0] * (longest - len(prompt)) for prompt in prompts])
    states = model(ids, attention_mask=mask).last_hidden_state
    return torch.cat([row[: len(prompt)] for row, prompt in zip(states, prompts, strict=True)])


@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_fp32_states_are_those_of_transformers(kind, encoders):
    model, folder = encoders(kind)
    ours = loaded(t5.build, folder).encode(prompts())
    assert [len(states) for states in ours] == list(LENGTHS)
    assert relative(torch.cat(ours), expected(model, prompts())) < 1e-4


def test_the_torch_backend_gives_the_same(encoders):
    model, folder = encoders("umt5")
    with backend.use("torch"):
        ours = torch.cat(loaded(t5.build, folder).encode(prompts()))
    assert relative(ours, expected(model, prompts())) < 1e-4


@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_bf16_is_as_close_to_the_truth_as_transformers(kind, encoders):
    model, folder = encoders(kind)
    truth = expected(model, prompts())
    half = type(model).from_pretrained(folder, dtype=torch.bfloat16).eval()
    ours = torch.cat(loaded(t5.build, folder, torch.bfloat16).encode(prompts()))
    assert ours.dtype == torch.bfloat16
    assert rms(ours.float() - truth) <= 1.25 * rms(expected(half, prompts()).float() - truth)


@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_two_ranks_give_what_one_does(kind, encoders):
    _, folder = encoders(kind)
    alone = torch.cat(loaded(t5.build, folder).encode(prompts()))
    for ours in loaded_on_ranks(2, t5.build, folder, lambda network: torch.cat(network.encode(prompts()))):
        assert relative(ours, alone) < 1e-5


def test_buckets_are_those_of_transformers():
    t5_module = require("transformers.models.t5.modeling_t5")
    distances = torch.arange(-700, 701)
    for num_buckets, max_distance in ((32, 128), (12, 24), (64, 512)):
        theirs = t5_module.T5Attention._relative_position_bucket(
            distances, num_buckets=num_buckets, max_distance=max_distance
        )
        assert torch.equal(t5.bucket_of(distances, num_buckets, max_distance), theirs)


XXL = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24, "feed_forward_proj": "gated-gelu"}


@pytest.mark.parametrize(("kind", "vocab_size"), [("t5", 32128), ("umt5", 256384)])
def test_published_sizes_have_the_tensors_of_transformers(kind, vocab_size):
    """T5-XXL of FLUX.1, UMT5-XXL of Wan."""
    transformers = require("transformers")
    config_class, model_class = {
        "t5": (transformers.T5Config, transformers.T5EncoderModel),
        "umt5": (transformers.UMT5Config, transformers.UMT5EncoderModel),
    }[kind]
    with torch.device("meta"):
        model = model_class(config_class(**XXL, vocab_size=vocab_size))
    encoder = t5.build({"model_type": kind, **XXL, "vocab_size": vocab_size})
    names = {name: encoder.checkpoint_name(name) for name in model.state_dict()}
    expected = {names[name]: tuple(value.shape) for name, value in model.state_dict().items() if names[name]}
    assert sources_of(encoder) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bart"}, "model_type 'bart'"),
        ({"feed_forward_proj": "relu"}, "feed_forward_proj 'relu', expected one of gated-gelu"),
        ({"relative_attention_num_buckets": 10}, "relative_attention_num_buckets 10"),
        ({"relative_attention_max_distance": 3}, "relative_attention_max_distance 3, expected more than 3"),
        ({"d_ff": "wide"}, "d_ff 'wide'"),
    ],
)
def test_other_configs_are_refused(change, message):
    with pytest.raises(UnsupportedConfig, match=message):
        t5.build({"model_type": "t5", **SIZES, **change})
