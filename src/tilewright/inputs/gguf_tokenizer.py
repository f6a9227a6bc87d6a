"""Tokenizers from the metadata of GGUF files: byte-level BPE ("gpt2") and SentencePiece BPE ("llama")."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright.host.files import CheckpointError

if TYPE_CHECKING:
    import tokenizers

_UNKNOWN, _CONTROL, _USER_DEFINED, _NORMAL = 2, 3, 4, 1

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_LLAMA3 = (_WORD + r"\p{N}{1,3}" + _TAIL,)
_QWEN2 = (_WORD + r"\p{N}" + _TAIL,)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SINGLE_DIGITS = (r"\p{N}", _GPT2)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

# tokenizer.ggml.pre -> patterns; each splits the pieces that the previous ones left.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "gpt-2": (_GPT2,),
    "gpt2": (_GPT2,),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
}
_IS_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_IS_QWEN = ("qwen2", "deepseek-r1-qwen", "qwen35")

_SPECIAL_KEYS = {  # name in templates -> name in GGUF, in its spelling
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",
}
# GGUF has one end-of-text id, but chat models end a turn with one token and a text with another.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>")


def build(metadata: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of `Tokenizer` from a GGUF file's metadata."""
    tokens: list[str] = _list(metadata, "tokens", str)
    types: list[int] = [_NORMAL] * len(tokens)
    if metadata.get("tokenizer.ggml.token_type"):
        types = _list(metadata, "token_type", int, len(tokens))
    special_tokens = {}
    for name, key in _SPECIAL_KEYS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            special_tokens[name] = tokens[token_id]
    try:
        backend = _backend(metadata, tokens, types)
        _mark_added(backend, tokens, types)
        _add_bos(backend, metadata, special_tokens)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises no narrower one, e.g. for a merge of unknown tokens
        raise CheckpointError(f"its tokenizer.ggml entries do not make a tokenizer: {error}") from error
    return {
        "backend": backend,
        "special_tokens": special_tokens,
        "stop_token_ids": _stop_token_ids(metadata, tokens, types),
        "chat_template": _templates(metadata),
    }


def _list(metadata: Mapping[str, object], key: str, kind: type, length: int | None = None) -> list[Any]:
    """Return the list tokenizer.ggml.<key>; check that all items are of one kind, and its length if given."""
    key = f"tokenizer.ggml.{key}"
    if key not in metadata:
        raise CheckpointError(f"the GGUF file has no {key}")
    value = metadata[key]
    kinds = (int, float) if kind is float else (kind,)
    if not isinstance(value, list) or not value or not all(isinstance(item, kinds) for item in value):
        raise CheckpointError(f"{key} is {reprlib.repr(value)}, expected a list of {kind.__name__}")
    if length is not None and len(value) != length:
        raise CheckpointError(f"{key} has {len(value)} entries for {length} tokens")
    return value


def _backend(metadata: Mapping[str, object], tokens: Sequence[str], types: Sequence[int]) -> tokenizers.Tokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        return _byte_level(metadata, tokens)
    if model == "llama":
        return _sentence_piece(metadata, tokens, types)
    raise CheckpointError(f"tokenizer.ggml.model is {model!r}, expected 'gpt2' or 'llama'")


def _byte_level(metadata: Mapping[str, object], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind = str(metadata.get("tokenizer.ggml.pre", "default"))
    if kind not in _PATTERNS:
        raise CheckpointError(f"tokenizer.ggml.pre is {kind!r}, expected one of {', '.join(_PATTERNS)}")
    merges: list[str] = _list(metadata, "merges", str)
    backend = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in merges],
            # Llama 3's vocabulary has words that no sequence of merges produces.
            ignore_merges=kind in _IS_LLAMA3,
        )
    )
    if kind in _IS_QWEN:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _PATTERNS[kind]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    # Search from the second character: the first part is not empty, and may begin with a space.
    at = merge.find(" ", 1)
    if at < 0:
        raise CheckpointError(f"tokenizer.ggml.merges has {merge!r}, expected two parts with a space between")
    return merge[:at], merge[at + 1 :]


def _sentence_piece(
    metadata: Mapping[str, object], tokens: Sequence[str], types: Sequence[int]
) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores: list[float] = _list(metadata, "scores", float, len(tokens))
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown_id, int) or not 0 <= unknown_id < len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.unknown_token_id is {unknown_id!r}, expected one of the {len(tokens)} tokens"
        )
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_of_scores(tokens, types, scores),
            unk_token=tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    add_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if add_space else spaces
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*pieces, decoders.Strip(" ", 1, 0)] if add_space else pieces)
    return backend


def _merges_of_scores(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the pairs in merge order: pairs that make tokens of higher scores come first."""
    normal = {token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind == _NORMAL}
    found = [
        (score, -index, token[:at], token[at:])
        for index, (token, score) in enumerate(normal.items())
        for at in range(1, len(token))
        if token[:at] in normal and token[at:] in normal
    ]
    found.sort(key=lambda merge: merge[:2], reverse=True)
    return [(left, right) for _, _, left, right in found]


def _mark_added(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    from tokenizers import AddedToken

    for kind in (_CONTROL, _USER_DEFINED):
        added = [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, its_kind in zip(tokens, types, strict=True)
            if its_kind == kind and token
        ]
        backend.add_special_tokens(added) if kind == _CONTROL else backend.add_tokens(added)


def _add_bos(backend: tokenizers.Tokenizer, metadata: Mapping[str, object], special_tokens: Mapping[str, str]) -> None:
    from tokenizers import processors

    is_llama = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _IS_LLAMA3
    before, after = [], []
    if metadata.get("tokenizer.ggml.add_bos_token", is_llama) and "bos_token" in special_tokens:
        before = [special_tokens["bos_token"]]
    if metadata.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in special_tokens:
        after = [special_tokens["eos_token"]]
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(before + after)],
        )


def _stop_token_ids(metadata: Mapping[str, object], tokens: Sequence[str], types: Sequence[int]) -> list[int]:
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    stops = [token_id for token_id in named if isinstance(token_id, int)]
    stops += [index for index, token in enumerate(tokens) if types[index] == _CONTROL and token in _ENDS]
    return list(dict.fromkeys(stops))


def _templates(metadata: Mapping[str, object]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {}
    for key, value in metadata.items():
        if key == prefix:
            found["default"] = str(value)
        elif key.startswith(prefix + "."):
            found[key[len(prefix) + 1 :]] = str(value)
    return found
