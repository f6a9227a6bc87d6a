"""CLIP's text encoder against transformers, on tiny random checkpoints."""

import functools

import pytest
import torch
from components import loaded, loaded_on_ranks, randomized, relative, rms
from oracle import require

from tilewright.host.files import CheckpointError
from tilewright.models.text_encoders import clip
from tilewright.types import RequestError, UnsupportedConfig

END = 97
SIZES = {
    "vocab_size": 99,
    "hidden_size": 60,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "max_position_embeddings": 20,
    "bos_token_id": 96,
    "pad_token_id": 1,
}
# As older checkpoints of FLUX.1 are, and as new ones.
KINDS = {"quick": {"hidden_act": "quick_gelu", "eos_token_id": 2}, "exact": {"hidden_act": "gelu", "eos_token_id": END}}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """transformers' encoder and its saved checkpoint, by kind."""
    transformers = require("transformers")

    @functools.cache
    def encoder(kind):
        model = randomized(transformers.CLIPTextModel(transformers.CLIPTextConfig(**SIZES, **KINDS[kind])))
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        return model, folder

    return encoder


def prompts():
    """Of one length, with several ends behind the first one: CLIP pads with them."""
    generator = torch.Generator().manual_seed(1)
    words = [torch.randint(3, 90, (count,), generator=generator).tolist() for count in (18, 0, 5)]
    return [[96, *some, *[END] * (19 - len(some))] for some in words]


@torch.no_grad()
def expected(model, prompts):
    output = model(torch.tensor(prompts))
    return output.last_hidden_state.flatten(0, 1), output.pooler_output


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_states_are_those_of_transformers(kind, encoders):
    model, folder = encoders(kind)
    encoder = loaded(clip.build, folder)
    states, pooled = expected(model, prompts())
    assert relative(torch.cat(encoder.encode(prompts())), states) < 1e-4
    assert relative(encoder.pool(prompts()), pooled) < 1e-4


def test_prompts_of_other_lengths_do_not_meet(encoders):
    _, folder = encoders("exact")
    encoder = loaded(clip.build, folder)
    short = [prompt[: prompt.index(END) + 1] for prompt in prompts()]
    together = encoder.encode(short)
    for states, prompt in zip(together, short, strict=True):
        assert torch.equal(states, encoder.encode([prompt])[0])
    assert relative(encoder.pool(short), encoder.pool(prompts())) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_as_close_to_the_truth_as_transformers(kind, encoders):
    model, folder = encoders(kind)
    truth, _ = expected(model, prompts())
    half = type(model).from_pretrained(folder, dtype=torch.bfloat16).eval()
    ours = torch.cat(loaded(clip.build, folder, torch.bfloat16).encode(prompts()))
    assert rms(ours.float() - truth) <= 1.25 * rms(expected(half, prompts())[0].float() - truth)


def test_two_ranks_give_what_one_does(encoders):
    _, folder = encoders("quick")
    alone = loaded(clip.build, folder).pool(prompts())
    for ours in loaded_on_ranks(2, clip.build, folder, lambda network: network.pool(prompts())):
        assert relative(ours, alone) < 1e-5


def test_names_of_older_checkpoints():
    encoder = clip.build({"model_type": "clip_text_model", **SIZES})
    assert encoder.checkpoint_name("text_model.final_layer_norm.bias") == "final_layer_norm.bias"
    assert encoder.checkpoint_name("text_model.embeddings.position_ids") is None


def test_prompts_that_do_not_fit(encoders):
    encoder = loaded(clip.build, encoders("exact")[1])
    with pytest.raises(RequestError, match=r"a prompt has 21 tokens, the limit .* is 20"):
        encoder.encode([[5] * 21])
    with pytest.raises(CheckpointError, match="lacks the token 97"):
        encoder.pool([[96, 5, 5]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "clip"}, "model_type 'clip'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"num_attention_heads": 7}, "7 heads, expected a divisor of its width, 60"),
    ],
)
def test_other_configs_are_refused(change, message):
    with pytest.raises(UnsupportedConfig, match=message):
        clip.build({"model_type": "clip_text_model", **SIZES, **change})
