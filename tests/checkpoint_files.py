"""Folders as checkpoints have them, made of the files in tests/data."""

import gzip
import json
import shutil
from pathlib import Path

DATA = Path(__file__).parent / "data"


def write_qwen3_vl_folder(folder: Path) -> Path:
    """The folder of a Qwen3-VL checkpoint, all but its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(gzip.decompress((DATA / "qwen3-tokenizer.json.gz").read_bytes()))
    for source, target in {
        "qwen3-tokenizer_config.json": "tokenizer_config.json",
        "qwen3_vl.jinja": "chat_template.jinja",
        "qwen3_vl_2b_config.json": "config.json",
        "qwen3_vl_preprocessor_config.json": "preprocessor_config.json",
        "qwen3_vl_video_preprocessor_config.json": "video_preprocessor_config.json",
    }.items():
        shutil.copyfile(DATA / source, folder / target)
    generation = {"eos_token_id": [151645, 151643]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def smollm2_metadata() -> dict:
    """The tokenizer.* metadata of SmolLM2's GGUF file."""
    return json.loads(gzip.decompress((DATA / "smollm2_gguf_tokenizer.json.gz").read_bytes()))


def llama_metadata(**more) -> dict:
    """A SentencePiece vocabulary such as Llama's: specials, bytes, characters, and words by their scores."""
    words = ["▁the", "▁th", "▁t", "he", "th", "▁cat", "▁c", "at", "▁ca", "cat", "in", "▁in", "hat", "ha", "▁hat", "▁▁"]
    characters = [*"▁theca inHAT.,é€"]
    characters.remove(" ")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *characters]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(characters))]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))] + [-1e9] * len(characters)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }
