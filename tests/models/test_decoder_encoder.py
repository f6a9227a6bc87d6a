"""Language models as text encoders: hidden states of chosen layers, as transformers gives them."""

import threading

import pytest
import torch
import transformers
from tiny_pipelines import qwen3, randomized

from tilewright.layers import partition
from tilewright.layers.partition import Partition
from tilewright.models.text_encoders import decoder_encoder
from tilewright.parallel.rendezvous import open_rendezvous
from tilewright.types import UnsupportedConfig
from tilewright.weights.load import load
from tilewright.weights.safetensors import SafetensorsCheckpoint

PROMPTS = [list(range(5, 25)), [7], list(range(100, 133))]


def qwen2_5_vl():
    """Its text side has biases, no norms of heads, and positions on three axes, equal for text."""
    text = {
        "vocab_size": 150,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
    }
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 48}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=140, video_token_id=141, vision_start_token_id=142
    )
    return randomized(transformers.Qwen2_5_VLForConditionalGeneration(config), 0.15)


@pytest.fixture(scope="module", params=[qwen3, qwen2_5_vl])
def pair(request, tmp_path_factory):
    torch.manual_seed(0)
    model = request.param()
    folder = tmp_path_factory.mktemp("encoder")
    model.save_pretrained(folder)
    return model, SafetensorsCheckpoint(folder)


def loaded(checkpoint, hidden_layers, dtype=torch.float32, group=None):
    parts = Partition(group) if group else partition.current()
    with partition.use(parts):
        encoder = decoder_encoder.build(checkpoint.config, hidden_layers)
    load(encoder, checkpoint, dtype=dtype, rename=encoder.checkpoint_name)
    return encoder


def of_transformers(model, prompt, hidden_layers, num_text=None):
    mask = torch.ones(1, len(prompt), dtype=torch.int64)
    if num_text is not None:
        mask[:, num_text:] = 0
    with torch.no_grad():
        output = model(torch.tensor([prompt]), attention_mask=mask, output_hidden_states=True)
    return torch.cat([output.hidden_states[layer][0] for layer in hidden_layers], dim=1)


@pytest.mark.parametrize("hidden_layers", [(-2,), (-1,), (0, 1, 2), (3,)])
def test_hidden_states_of_several_prompts_at_once(pair, hidden_layers):
    model, checkpoint = pair
    encoder = loaded(checkpoint, hidden_layers)
    for prompt, found in zip(PROMPTS, encoder.encode(PROMPTS), strict=True):
        expected = of_transformers(model, prompt, hidden_layers)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_padding_sees_the_text_and_is_not_seen(pair):
    model, checkpoint = pair
    encoder = loaded(checkpoint, (1, -1))
    found = encoder.encode(PROMPTS, lengths=[12, 1, 33])
    for prompt, length, states in zip(PROMPTS, (12, 1, 33), found, strict=True):
        expected = of_transformers(model, prompt, (1, -1), length)
        torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-4)


def test_layers_that_are_not_read_are_not_loaded(pair):
    encoder = loaded(pair[1], (1,))
    assert len(encoder.layers) == 1 and encoder.norm is None
    assert encoder.checkpoint_name("model.layers.1.mlp.up_proj.weight") is None
    assert encoder.checkpoint_name("layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert encoder.checkpoint_name("lm_head.weight") is None


def test_two_ranks(pair):
    _, checkpoint = pair
    expected = loaded(checkpoint, (-1,)).encode(PROMPTS)
    host, results = open_rendezvous(2), [None, None]

    def run(rank):
        results[rank] = loaded(checkpoint, (-1,), group=host.make_group(rank)).encode(PROMPTS)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    host.close()
    for result in results:
        for found, states in zip(result, expected, strict=True):
            torch.testing.assert_close(found, states, atol=1e-4, rtol=1e-4)


def test_bf16_errs_no_more_than_transformers_does(pair):
    model, checkpoint = pair
    exact = of_transformers(model, PROMPTS[2], (-1,))
    theirs = of_transformers(type(model).from_pretrained(checkpoint.path, dtype=torch.bfloat16), PROMPTS[2], (-1,))
    ours = loaded(checkpoint, (-1,), torch.bfloat16).encode(PROMPTS[2:])[0]
    errors = [(found.float() - exact).square().mean().sqrt().item() for found in (ours, theirs)]
    assert 0 < errors[0] <= 1.25 * errors[1], errors


def test_what_is_not_built_is_named():
    with pytest.raises(UnsupportedConfig, match="model_type is 'bert', expected one of"):
        decoder_encoder.build({"model_type": "bert"})
    config = qwen3().config.to_dict()
    with pytest.raises(UnsupportedConfig, match="hidden states of layer 9 are read, but the text encoder has 3 layers"):
        decoder_encoder.build(config, (9,))
