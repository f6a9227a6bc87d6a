"""Qwen's tokenizer from vocab.json and merges.txt: Qwen3-Omni's folder has no tokenizer.json.

Byte-level pairs within words; added tokens are in tokenizer_config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright import files
from tilewright.model_files import MAX_VOCABULARY_BYTES, CheckpointError, check_file

if TYPE_CHECKING:
    import tokenizers

# Endings of English words; letters with what stands before them; single digits; signs; line ends; spaces.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def describes(folder: Path, config: Mapping[str, object]) -> bool:
    """Whether the folder's files are such a tokenizer; `config` is its tokenizer_config.json."""
    is_qwen = str(config.get("tokenizer_class")).startswith("Qwen2Tokenizer")
    return is_qwen and files.exists(folder / "vocab.json") and files.exists(folder / "merges.txt")


def build(folder: Path) -> tokenizers.Tokenizer:
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
    words = pre_tokenizers.Split(tokenizers.Regex(_WORDS), behavior="isolated")
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of_words])
    backend.decoder = decoders.ByteLevel()
    return backend
