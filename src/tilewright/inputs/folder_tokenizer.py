"""Tokenizers from the files of a checkpoint's folder: tokenizer.json, or else vocab.json and merges.txt.

FLUX.1's folder of CLIP and Qwen3-Omni's folder have no tokenizer.json. Both are byte-level BPE: CLIP's of lower-case
words, with "</w>" at the end of a word's last token, between a start and an end token; Qwen's within words, with added
tokens in tokenizer_config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.host import files
from tilewright.host.files import (
    MAX_VOCABULARY_BYTES,
    CheckpointError,
    check_file,
    read_file,
    read_json,
    read_optional_json,
)
from tilewright.inputs.chat_template import read_templates

if TYPE_CHECKING:
    import tokenizers

# Special tokens that templates may name; lists (additional_special_tokens) have no name.
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

ADDED_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def build(folder: Path) -> dict[str, Any]:
    """Return the arguments of `Tokenizer` from the folder's files."""
    path = folder / "tokenizer.json"
    # Small files first: their errors are raised before a second is spent on the vocabulary.
    config = read_optional_json(folder / "tokenizer_config.json")
    generation_config = read_optional_json(folder / "generation_config.json")
    model_config = read_optional_json(folder / "config.json")
    special_tokens = _special_tokens({**read_optional_json(folder / "special_tokens_map.json"), **config})
    templates = read_templates(folder, config)
    if files.exists(path):
        backend = _from_file(path)
    elif describes_clip(folder, config):
        backend = build_clip(folder, special_tokens)
    elif describes_qwen(folder, config):
        backend = build_qwen(folder)
    else:
        raise FileNotFoundError(f"{folder} has no tokenizer.json")
    _add_missing_tokens(backend, config.get("added_tokens_decoder"))
    return {
        "backend": backend,
        "special_tokens": special_tokens,
        "stop_token_ids": _stop_token_ids(backend, generation_config, model_config, special_tokens),
        "chat_template": templates,
    }


def _from_file(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    data = read_file(path, MAX_VOCABULARY_BYTES)
    try:
        return tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises no narrower one
        read_json(path, MAX_VOCABULARY_BYTES)  # raises a clearer error if it is not JSON at all
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from error


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_NAMES:
        token = config.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _add_missing_tokens(backend: tokenizers.Tokenizer, added: object) -> None:
    """Add the tokens of tokenizer_config.json that tokenizer.json lacks, in the order of their ids."""
    from tokenizers import AddedToken

    known = backend.get_added_tokens_decoder()
    for token_id, fields in sorted((int(token_id), fields) for token_id, fields in dict(added or {}).items()):  # type: ignore[call-overload]
        if token_id in known:
            continue
        flags = {name: fields[name] for name in ADDED_TOKEN_FLAGS if name in fields}
        backend.add_tokens([AddedToken(fields["content"], **flags)])
        if (actual := backend.token_to_id(fields["content"])) != token_id:
            raise CheckpointError(
                f"tokenizer_config.json gives {fields['content']!r} the id {token_id}, tokenizer.json {actual}"
            )


def _stop_token_ids(
    backend: tokenizers.Tokenizer,
    generation_config: Mapping[str, object],
    config: Mapping[str, object],
    special_tokens: Mapping[str, str],
) -> list[int]:
    """Return the tokens that end an answer: generation_config.json's, or else config.json's and the tokenizer's.

    The tokenizer's is included because Qwen3.5's config has only the end of a text, not that of a chat's turn.
    """
    if stop := _token_ids(generation_config, "generation_config.json"):
        return stop
    text_config = config.get("text_config")
    stop = _token_ids(config, "config.json")
    if not stop and isinstance(text_config, Mapping):
        stop = _token_ids(text_config, "config.json")
    eos_token = special_tokens.get("eos_token")
    token_id = None if eos_token is None else backend.token_to_id(eos_token)
    return stop if token_id is None or token_id in stop else [*stop, token_id]


def _token_ids(config: Mapping[str, object], file: str) -> list[int]:
    """Return the ids in eos_token_id, which is an id, a list of ids, or null."""
    given = config.get("eos_token_id")
    listed: list = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(token_id) is int for token_id in listed):
        raise CheckpointError(f"{file} has eos_token_id {given!r}, expected a token id or a list of them")
    return listed


WORD_END = "</w>"
# Endings of English words, runs of letters, single digits, runs of other characters except spaces.
_CLIP_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def describes_clip(folder: Path, config: Mapping[str, object]) -> bool:
    """Return whether the folder has a CLIP tokenizer; `config` is its tokenizer_config.json."""
    is_clip = str(config.get("tokenizer_class")).startswith("CLIPTokenizer")
    return is_clip and files.exists(folder / "vocab.json") and files.exists(folder / "merges.txt")


def build_clip(folder: Path, special_tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    start = special_tokens.get("bos_token", "<|startoftext|>")
    end = special_tokens.get("eos_token", "<|endoftext|>")
    unknown = special_tokens.get("unk_token", end)
    for name in ("vocab.json", "merges.txt"):
        check_file(folder / name, MAX_VOCABULARY_BYTES)
    try:
        vocab, merges = models.BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        model = models.BPE(vocab, merges, unk_token=unknown, end_of_word_suffix=WORD_END)
    except Exception as error:  # the library raises no narrower one
        raise CheckpointError(f"{folder}: vocab.json and merges.txt cannot be read: {error}") from error
    for token in (start, end, unknown):
        if token not in vocab:
            raise CheckpointError(f"{folder / 'vocab.json'} lacks the token {token!r}, which its config names")
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(tokenizers.Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    words = pre_tokenizers.Split(tokenizers.Regex(_CLIP_WORDS), behavior="removed", invert=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, vocab[start]), (end, vocab[end])]
    )
    backend.add_special_tokens([start, end])
    return backend


# Endings of English words; letters with one character before them; single digits; signs; line ends; spaces.
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def describes_qwen(folder: Path, config: Mapping[str, object]) -> bool:
    """Return whether the folder has a Qwen tokenizer; `config` is its tokenizer_config.json."""
    is_qwen = str(config.get("tokenizer_class")).startswith("Qwen2Tokenizer")
    return is_qwen and files.exists(folder / "vocab.json") and files.exists(folder / "merges.txt")


def build_qwen(folder: Path) -> tokenizers.Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    for name in ("vocab.json", "merges.txt"):
        check_file(folder / name, MAX_VOCABULARY_BYTES)
    try:
        vocab, merges = models.BPE.read_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    except Exception as error:  # the library raises no narrower one
        raise CheckpointError(f"{folder}: vocab.json and merges.txt cannot be read: {error}") from error
    backend.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(tokenizers.Regex(_QWEN_WORDS), behavior="isolated")
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of_words])
    backend.decoder = decoders.ByteLevel()
    return backend
