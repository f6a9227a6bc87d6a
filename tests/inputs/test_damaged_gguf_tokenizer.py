"""Vocabularies of damaged GGUF files: a tokenizer comes out, or an error that names the entry."""

import random

import pytest
from checkpoint_files import llama_metadata, smollm2_metadata

from tilewright.host.files import CheckpointError
from tilewright.inputs.tokenizer import Tokenizer

NUM_TOKENS = 600
ODD_VALUES = [None, -1, 2**63, 1.5, float("nan"), True, "", "$A", "llama", [], [1], ["a", "b"], [None], "\ufffd"]


def byte_level_metadata() -> dict:
    """The beginning of SmolLM2's vocabulary, and the merges within it."""
    whole = smollm2_metadata()
    tokens = whole["tokenizer.ggml.tokens"][:NUM_TOKENS]
    known = set(tokens)
    merges = [merge for merge in whole["tokenizer.ggml.merges"] if {*merge.split(" "), merge.replace(" ", "")} <= known]
    types = whole["tokenizer.ggml.token_type"][:NUM_TOKENS]
    cut = {"tokens": tokens, "token_type": types, "merges": merges}
    return whole | {f"tokenizer.ggml.{key}": value for key, value in cut.items()}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens": "a"}, "tokens is 'a', expected a list of str"),
        ({"tokens": []}, r"tokens is \[\], expected a list of str"),
        ({"tokens": [1, 2]}, r"tokens is \[1, 2\], expected a list of str"),
        ({"token_type": ["a"]}, r"token_type is \['a'\], expected a list of int"),
        ({"token_type": [1]}, r"token_type has 1 entries for \d+ tokens"),
        ({"scores": [0.0]}, r"scores has 1 entries for \d+ tokens"),
        ({"scores": None}, "scores is None, expected a list of float"),
        ({"unknown_token_id": 10**6}, r"unknown_token_id is 1000000, expected one of the \d+ tokens"),
        ({"unknown_token_id": "a"}, r"unknown_token_id is 'a', expected one of the \d+ tokens"),
        ({"model": ["llama"]}, r"model is \['llama'\], expected 'gpt2' or 'llama'"),
    ],
)
def test_damaged_sentence_piece(changes, message):
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(CheckpointError, match=f"tokenizer.ggml.{message}"):
        Tokenizer.from_gguf(llama_metadata() | changed)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"merges": ["Ġ t", "unheard of"]}, "its tokenizer.ggml entries do not make a tokenizer: .*unheard"),
        ({"merges": [7]}, r"tokenizer.ggml.merges is \[7\], expected a list of str"),
        ({"merges": ["whole"]}, "tokenizer.ggml.merges has 'whole', expected two parts"),
        ({"pre": ["smollm"]}, "tokenizer.ggml.pre is .*, expected one of"),
    ],
)
def test_damaged_byte_level(changes, message):
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf(byte_level_metadata() | changed)


def damage(metadata: dict, rng: random.Random) -> dict:
    """One to three entries changed, their lists cut, shuffled or with an odd item; or taken out."""
    metadata = dict(metadata)
    for _ in range(rng.randint(1, 3)):
        key = rng.choice([*metadata, "tokenizer.ggml.add_bos_token", "tokenizer.ggml.pre"])
        value = metadata.get(key)
        if isinstance(value, list) and value and rng.random() < 0.7:
            at, other = rng.randrange(len(value)), rng.choice([*ODD_VALUES, rng.choice(value)])
            cut, doubled = value[:at], [*value[:at], other, *value[at:]]
            metadata[key] = rng.choice([cut, doubled, [*value[:at], other, *value[at + 1 :]], value[::-1]])
        elif rng.random() < 0.5:
            metadata[key] = rng.choice(ODD_VALUES)
        else:
            metadata.pop(key, None)
    return metadata


@pytest.mark.parametrize("make", [byte_level_metadata, llama_metadata])
def test_any_damage_is_a_tokenizer_or_a_clear_error(make):
    rng, metadata = random.Random(1), make()
    outcomes = {"made": 0, "refused": 0}
    for _ in range(300):
        try:
            tokenizer = Tokenizer.from_gguf(damage(metadata, rng))
        except CheckpointError:
            outcomes["refused"] += 1
        else:
            tokenizer.decode(tokenizer.encode("the cat ½", add_special_tokens=True))
            outcomes["made"] += 1
    assert min(outcomes.values()) > 30
