import json
from itertools import pairwise

import pytest
import tokenizers
from checkpoint_files import llama_metadata, smollm2_metadata, write_qwen3_vl_folder
from fuzzing import num_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import require
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tilewright.host.files import CheckpointError
from tilewright.inputs.tokenizer import Tokenizer

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "<tool_call>", "<|image_pad|>", "<s>", "</s>"]
ODD = [
    "   ",
    "\n\n",
    "\r\n",
    "\t",
    "1234567",
    "it'LL",
    "e\u0301",
    "½",
    "Ⅷ",
    "١٢٣",
    "👨‍👩‍👧",
    "🇫🇷",
    "日本語",
    "\x00",
    "\ufffd",
    "\u00a0",
]
TEXTS = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(SPECIALS), st.sampled_from(ODD))).map("".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_qwen3_vl_folder(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def qwen(folder):
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def oracle(folder):
    return require("transformers").AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def smollm():
    return Tokenizer.from_gguf(smollm2_metadata())


@pytest.fixture(scope="module")
def llama():
    return Tokenizer.from_gguf(llama_metadata())


@pytest.mark.slow
@settings(max_examples=num_cases(150), deadline=None)
@given(TEXTS)
def test_ids_and_text_are_those_of_transformers(qwen, oracle, text):
    ids = qwen.encode(text)
    assert ids == oracle.encode(text, add_special_tokens=False)
    for skip in (True, False):
        assert qwen.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_names_and_ids_of_specials(qwen, oracle):
    assert qwen.vocab_size == len(oracle) == 151669
    assert qwen.special_tokens == oracle.special_tokens_map
    assert qwen.bos_token_id is None
    assert qwen.stop_token_ids == (151645, 151643)
    assert qwen.token_id("<|image_pad|>") == 151655
    assert qwen.token_id("<|no such|>") is None
    assert "<|vision_start|>" in qwen.chat_template["default"]


def test_stop_ids_without_a_generation_config(folder, tmp_path):
    for path in folder.iterdir():
        if path.name != "generation_config.json":
            (tmp_path / path.name).symlink_to(path)
    assert Tokenizer.from_folder(tmp_path).stop_token_ids == (151645,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 151643}')
    assert Tokenizer.from_folder(tmp_path).stop_token_ids == (151643,)


@pytest.fixture
def small_folder(tmp_path):
    """A vocabulary of five, "<end>" ending a turn."""
    tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "<end>": 3, "<eot>": 4}, [])).save(
        str(tmp_path / "tokenizer.json")
    )
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return tmp_path


@pytest.mark.parametrize(
    "generation, config, expected",
    [
        ({"eos_token_id": 4}, {"eos_token_id": 2}, (4,)),
        ({"eos_token_id": [4, 1]}, {"eos_token_id": 2}, (4, 1)),
        ({}, {"eos_token_id": 4}, (4, 3)),
        ({"eos_token_id": None}, {"eos_token_id": [4, 3]}, (4, 3)),
        ({}, {"text_config": {"eos_token_id": 4}}, (4, 3)),
        ({}, {"eos_token_id": None, "text_config": {"eos_token_id": [1, 2]}}, (1, 2, 3)),
        ({}, {"eos_token_id": 1, "text_config": {"eos_token_id": 2}}, (1, 3)),
        ({}, {"text_config": None}, (3,)),
    ],
)
def test_ends_are_read_from_the_generation_config_then_from_the_config(small_folder, generation, config, expected):
    (small_folder / "generation_config.json").write_text(json.dumps(generation))
    (small_folder / "config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(small_folder).stop_token_ids == expected


def test_an_end_that_is_no_token_id(small_folder):
    (small_folder / "config.json").write_text('{"eos_token_id": ["<eot>"]}')
    with pytest.raises(CheckpointError, match=r"config.json has eos_token_id \['<eot>'\], expected a token id"):
        Tokenizer.from_folder(small_folder)


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_tokens_only_the_config_lists(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"added_tokens_decoder": {"2": {"content": "<end>", "special": True}}, "eos_token": {"content": "<end>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a<end>b") == [0, 2, 1]
    assert tokenizer.stop_token_ids == (2,)
    config["added_tokens_decoder"] = {"7": {"content": "<end>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"gives '<end>' the id 7, tokenizer.json 2"):
        Tokenizer.from_folder(tmp_path)


def test_a_lone_surrogate_is_no_crash(qwen):
    assert qwen.encode("a\ud83db") == qwen.encode("a?b")


def test_text_of_single_tokens(qwen, llama):
    assert qwen.token_text(qwen.encode(" world")[0]) == " world"
    parts = [qwen.token_bytes(token_id) for token_id in qwen.encode("𓀀")]
    assert len(parts) > 1 and b"".join(parts).decode() == "𓀀"
    assert qwen.token_text(qwen.encode("𓀀")[-1]) == "\ufffd"
    assert qwen.token_text(151_930) == ""  # a row of the padded head
    assert llama.token_text(llama.token_id("▁the")) == " the"
    assert llama.token_bytes(llama.token_id("<0xE2>")) == b"\xe2"
    assert llama.token_text(llama.token_id("</s>")) == "</s>"


@pytest.mark.parametrize("name", ["qwen", "smollm", "llama", "llama_without_space"])
@settings(max_examples=num_cases(150), deadline=None)
@given(data=st.data())
def test_a_stream_gives_what_decode_gives(request, name, data):
    if name == "llama_without_space":
        tokenizer = Tokenizer.from_gguf(llama_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
    else:
        tokenizer = request.getfixturevalue(name)
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size + 9), max_size=24)
    ids = data.draw(st.one_of(any_ids, TEXTS.map(tokenizer.encode)))
    skip = data.draw(st.booleans())
    stream = tokenizer.stream(skip_special_tokens=skip)
    pieces, position = [], 0
    while position < len(ids):
        count = data.draw(st.integers(1, 3))
        pieces.append(stream.push(ids[position : position + count]))
        position += count
    assert "".join([*pieces, stream.flush()]) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["qwen", "smollm", "llama"])
def test_a_stream_never_breaks_a_character(request, name):
    tokenizer = request.getfixturevalue(name)
    text = "the cat 🦙 日本 é€ 👨‍👩‍👧 in"
    stream = tokenizer.stream()
    pieces = [stream.push([token_id]) for token_id in tokenizer.encode(text)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text, "no character may wait for the end of the answer"


def test_smollm2_splits_digits(smollm):
    """The oracle is SmolLM2's own arrangement: digits one by one, then GPT-2's pattern."""
    metadata = smollm2_metadata()
    vocab = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(vocab, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])

    @settings(max_examples=num_cases(150), deadline=None)
    @given(TEXTS)
    def check(text):
        assert smollm.encode(text) == backend.encode(text).ids

    check()
    assert smollm.stop_token_ids == (2, 0)
    assert smollm.special_tokens["bos_token"] == "<|im_start|>"
    assert smollm.encode("Hi", add_special_tokens=True) == smollm.encode("Hi"), "add_bos_token is false in the file"


def test_qwen_from_gguf_metadata(folder, qwen):
    """Qwen's tokenizer.json said in GGUF's words gives the same ids."""
    saved = json.loads((folder / "tokenizer.json").read_text())
    tokens = {token_id: (token, 1) for token, token_id in saved["model"]["vocab"].items()}
    for added in saved["added_tokens"]:
        tokens[added["id"]] = added["content"], 3 if added["special"] else 4
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [tokens[index][0] for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [tokens[index][1] for index in range(len(tokens))],
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in saved["model"]["merges"]
        ],
        "tokenizer.ggml.eos_token_id": 151645,
        "tokenizer.chat_template": "hello",
        "tokenizer.chat_template.tool_use": "tools",
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.chat_template == {"default": "hello", "tool_use": "tools"}
    assert tokenizer.stop_token_ids == (151645, 151643)

    @settings(max_examples=num_cases(100), deadline=None)
    @given(TEXTS)
    def check(text):
        assert tokenizer.encode(text) == qwen.encode(text)

    check()


def merge_by_score(text: str, metadata: dict) -> list[str]:
    """SentencePiece's rule, plainly: of all neighbours, join those that make the token of the highest score."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    known = {token for token, kind in zip(tokens, kinds, strict=True) if kind == 1}
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [left + right for left, right in pairwise(pieces)]
        joined = [(-scores[pair], at) for at, pair in enumerate(pairs) if pair in known]
        if not joined:
            break
        at = min(joined)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [
        token for piece in pieces for token in ([piece] if piece in known else [f"<0x{b:02X}>" for b in piece.encode()])
    ]


@settings(max_examples=num_cases(150), deadline=None)
@given(st.text(alphabet="the cainHAT.é€🦙\n", min_size=1, max_size=30))
def test_llama_merges_by_score(llama, text):
    metadata = llama_metadata()
    expected = [metadata["tokenizer.ggml.tokens"].index(token) for token in merge_by_score(text, metadata)]
    assert llama.encode(text) == expected
    assert llama.decode(expected) == text


def test_llama_begins_and_ends(llama):
    assert llama.bos_token_id == 1 and llama.stop_token_ids == (2,)
    assert llama.encode("the", add_special_tokens=True) == [1, *llama.encode("the")]
    assert llama.encode("the</s>") == [llama.token_id("▁the"), 2]
    both = Tokenizer.from_gguf(llama_metadata(**{"tokenizer.ggml.add_eos_token": True}))
    assert both.encode("the", add_special_tokens=True) == [1, *llama.encode("the"), 2]
    none = Tokenizer.from_gguf(llama_metadata(**{"tokenizer.ggml.add_bos_token": False}))
    assert none.encode("the", add_special_tokens=True) == llama.encode("the")
    bare = Tokenizer.from_gguf(llama_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
    assert bare.encode("cat") == [bare.token_id("cat")] and bare.decode(bare.encode(" cat")) == " cat"


@pytest.mark.parametrize(
    "change,message",
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert', expected 'gpt2' or 'llama'"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "klingon"},
            "pre is 'klingon', expected one of",
        ),
        ({"tokenizer.ggml.scores": [1.0]}, "scores has 1 entries for 290 tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries for 290 tokens"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["ab"]}, "merges has 'ab', expected two parts"),
        ({"tokenizer.ggml.model": "gpt2"}, "the GGUF file has no tokenizer.ggml.merges"),
    ],
)
def test_errors_of_metadata_name_the_value(change, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(llama_metadata(**change))


def test_qwen_from_vocab_and_merges(tmp_path):
    """As Qwen3-Omni's folder has it: the same ids as tokenizer.json, added tokens from tokenizer_config.json."""
    whole = write_qwen3_vl_folder(tmp_path / "whole")
    model = json.loads((whole / "tokenizer.json").read_text())["model"]
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    config = json.loads((whole / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "Qwen2Tokenizer"}))
    ours, expected = Tokenizer.from_folder(folder), Tokenizer.from_folder(whole)
    for text in ("Don't stop; it's 2026!\n\n  Größe ﬁne 你好, 世界 🙂\t<|im_start|>user\n<think> x", "", " \r\n "):
        assert ours.encode(text) == expected.encode(text)
    (folder / "merges.txt").write_text("nonsense")
    with pytest.raises(CheckpointError, match=r"vocab\.json and merges\.txt cannot be read"):
        Tokenizer.from_folder(folder)
