"""CLIP's tokenizer from vocab.json and merges.txt: FLUX.1's folder has no tokenizer.json for it.

Byte-level pairs of lower-case words, the last token of a word marked with "</w>", between a start and an end token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright import files
from tilewright.model_files import MAX_VOCABULARY_BYTES, CheckpointError, check_file

if TYPE_CHECKING:
    import tokenizers

WORD_END = "</w>"
# Endings of English words, letters, single digits, and all else that is no space.
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def describes(folder: Path, config: Mapping[str, object]) -> bool:
    """Whether the folder's files are such a tokenizer; `config` is its tokenizer_config.json."""
    is_clip = str(config.get("tokenizer_class")).startswith("CLIPTokenizer")
    return is_clip and files.exists(folder / "vocab.json") and files.exists(folder / "merges.txt")


def build(folder: Path, special_tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
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
    words = pre_tokenizers.Split(tokenizers.Regex(_WORDS), behavior="removed", invert=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, vocab[start]), (end, vocab[end])]
    )
    backend.add_special_tokens([start, end])
    return backend
