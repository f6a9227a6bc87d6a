"""GGUF files of language models as checkpoints: their config and tensor names in Hugging Face's words.

Quantised tensors are decoded as they are read, or taken apart into the numbers they have (`gguf_numbers`). The q and k
rows of the llama architecture are stored in the order of the older rotary embedding, which turns neighbours instead of
halves: reading puts them back.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tilewright.model_files import CheckpointError
from tilewright.ops.quantized import Quantized
from tilewright.weights.dequantize import dequantize
from tilewright.weights.gguf_file import GgufFile, StoredTensor
from tilewright.weights.gguf_numbers import SPLITS
from tilewright.weights.mapped import MappedFile

# The class and model_type of Hugging Face's config by GGUF's name of the architecture.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}

ROPE_FREQUENCIES = "rope_freqs.weight"  # Llama 3's scaling, worked out: the config has the rule instead

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERT_NAMES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GgufCheckpoint:
    """A GGUF file, or the parts of one, any of which names them all: a `weights.checkpoint.Checkpoint`.

    The experts of a layer, one tensor in the file, are tensors of their own here.
    """

    files: Path | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        files = _parts(path)
        tensors = _all_tensors(files)
        self.config: dict = _config(files[0], tensors)
        self.tokenizer_metadata: Mapping[str, object] | None = {
            key: value for key, value in files[0].metadata.items() if key.startswith("tokenizer.")
        }
        self._tensors: dict[str, _Placed] = {}
        for name, placed in tensors.items():
            if name != ROPE_FREQUENCIES:
                self._tensors |= _named(name, placed)
        self.shapes: Mapping[str, tuple[int, ...]] = {name: placed.shape for name, placed in self._tensors.items()}
        digest = hashlib.sha256()
        for file in files:
            mapped = file.mapped
            digest.update(f"{mapped.path.name} {mapped.size_bytes} {mapped.modified_ns} ".encode())
            digest.update(mapped.memory[: file.header_bytes])
        self.fingerprint = digest.hexdigest()

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].format.dtype

    def size_bytes(self, name: str) -> int:
        return self._tensors[name].size_bytes

    def read(self, name: str) -> Tensor:
        """The tensor: in place for F32, F16 and BF16 unless its rows are put in order, else decoded to fp32."""
        return self.rows(name, 0, self._tensors[name].shape[0])

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of its first axis."""
        tensor = self._tensors[name]
        num_heads = self._num_permuted_heads(name)
        if num_heads is None:
            return self._stored_rows(tensor, begin, end)
        # Whole heads are read, put in order and cut.
        head_rows = tensor.shape[0] // num_heads
        first, last = begin // head_rows, -(-end // head_rows)
        heads = self._stored_rows(tensor, first * head_rows, last * head_rows)
        return _in_order(heads, head_rows)[begin - first * head_rows : end - first * head_rows]

    def quantized_as(self, name: str) -> tuple[str, int] | None:
        """The format that has the numbers of a matrix; None: it has none, or none that kernels multiply."""
        tensor = self._tensors[name]
        split = SPLITS.get(tensor.format.name)
        return None if split is None or len(tensor.shape) != 2 else split.format

    def quantized_rows(self, name: str, begin: int, end: int) -> Quantized:
        """Rows [begin, end) of a matrix in that format."""
        tensor = self._tensors[name]
        num_heads = self._num_permuted_heads(name)
        head_rows = 1 if num_heads is None else tensor.shape[0] // num_heads
        first, last = begin // head_rows * head_rows, -(-end // head_rows) * head_rows
        row_bytes = tensor.size_bytes // tensor.shape[0]
        data = tensor.file.bytes_at(tensor.offset + first * row_bytes, (last - first) * row_bytes)
        try:
            whole = SPLITS[tensor.format.name].rows(_aligned(data), last - first)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {name}: {error}") from error

        def cut(part: Tensor) -> Tensor:
            return (part if num_heads is None else _in_order(part, head_rows))[begin - first : end - first]

        mins = None if whole.mins is None else cut(whole.mins)
        return Quantized(whole.name, cut(whole.values), cut(whole.scales), mins, whole.group_size)

    def release(self, name: str) -> None:
        """Releases the tensor's pages."""
        tensor = self._tensors[name]
        tensor.file.release(tensor.offset, tensor.size_bytes)

    def _stored_rows(self, tensor: _Placed, begin: int, end: int) -> Tensor:
        if len(tensor.shape) == 1:
            # One row of the format holds all of a vector.
            data = tensor.file.bytes_at(tensor.offset, tensor.size_bytes)
            return dequantize(_aligned(data), tensor.format, tensor.shape[0])[0, begin:end]
        row_bytes = tensor.size_bytes // max(tensor.shape[0], 1)
        data = tensor.file.bytes_at(tensor.offset + begin * row_bytes, (end - begin) * row_bytes)
        return dequantize(_aligned(data), tensor.format, tensor.shape[-1]).view(end - begin, *tensor.shape[1:])

    def _num_permuted_heads(self, name: str) -> int | None:
        if self.config["model_type"] != "llama":
            return None
        if ".self_attn.q_proj." in name:
            return self.config["num_attention_heads"]
        if ".self_attn.k_proj." in name:
            return self.config["num_key_value_heads"]
        return None


@dataclass(frozen=True)
class _Placed(StoredTensor):
    """A tensor and the file it lies in."""

    file: MappedFile


def _parts(path: Path) -> list[GgufFile]:
    """The file, or all of those that it is a part of, in order."""
    file = GgufFile(path)
    count = file.metadata.get("split.count", 1)
    if count in (0, 1):
        return [file]
    name = _PART.fullmatch(path.name)
    if type(count) is not int or name is None or int(name[3]) != count:
        raise CheckpointError(
            f"{path} is one of {count} parts, but is not named so: expected a name that ends in "
            f"-00001-of-{count:0>5}.gguf"
        )
    paths = [path.with_name(f"{name[1]}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path} is one of {count} parts, and {', '.join(missing[:5])} is missing: download it")
    files = [file if part == path else GgufFile(part) for part in paths]
    for number, part in enumerate(files):
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, count):
            raise CheckpointError(f"{part.mapped.path} does not say that it is part {number + 1} of {count}")
    return files


def _all_tensors(files: Sequence[GgufFile]) -> dict[str, _Placed]:
    found: dict[str, _Placed] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in found:
                raise CheckpointError(f"{file.mapped.path} has the tensor {name}, as an earlier part has")
            found[name] = _Placed(tensor.offset, tensor.size_bytes, tensor.shape, tensor.format, file.mapped)
    stated = files[0].metadata.get("split.tensors.count", len(found))
    if stated != len(found):
        raise CheckpointError(f"{files[0].mapped.path} and its parts have {len(found)} tensors, expected {stated}")
    return found


def _named(name: str, placed: _Placed) -> dict[str, _Placed]:
    """A tensor under Hugging Face's name; one of all experts as a tensor for each."""
    experts = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if experts is None or experts[2] not in _EXPERT_NAMES or len(placed.shape) != 3:
        return {huggingface_name(name): placed}
    stem, size_bytes = f"model.layers.{experts[1]}.mlp.experts", placed.size_bytes // placed.shape[0]
    return {
        f"{stem}.{expert}.{_EXPERT_NAMES[experts[2]]}.weight": replace(
            placed, offset=placed.offset + expert * size_bytes, size_bytes=size_bytes, shape=placed.shape[1:]
        )
        for expert in range(placed.shape[0])
    }


def _in_order(rows: Tensor, head_rows: int) -> Tensor:
    """Rows of whole heads, of which the file has the two halves in turn."""
    return rows.view(-1, head_rows // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _aligned(data: Tensor) -> Tensor:
    # A file may ask for an alignment below that of its elements.
    return data if data.data_ptr() % 4 == 0 else data.clone()


def huggingface_name(name: str) -> str:
    """The name a tensor has in a Hugging Face checkpoint; as it is where there is none, so that loading lists it."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


class _Keys:
    """The metadata of one architecture, checked as it is asked for."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file, self._prefix = file, architecture

    def get(self, key: str, kind: type, default: object = None) -> object:
        """The value of "<architecture>.<key>", a number; `default` where the file has none."""
        value = self._file.metadata.get(f"{self._prefix}.{key}", default)
        allowed = (int, float) if kind is float else (kind,)
        if value is not default and (isinstance(value, bool) or not isinstance(value, allowed)):
            raise CheckpointError(
                f"{self._file.mapped.path}: {self._prefix}.{key} is {value!r}, expected {kind.__name__}"
            )
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, default)
        if not isinstance(value, int) or not 1 <= value < 1 << 32:
            raise CheckpointError(f"{self._file.mapped.path}: {self._prefix}.{key} is {value}, expected 1 or more")
        return value


def _config(file: GgufFile, tensors: Mapping[str, _Placed]) -> dict:
    """What config.json of the model would say. `file` has the metadata."""
    path, metadata = file.mapped.path, file.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{path} has the architecture {architecture!r}; those supported are {supported}")
    class_name, model_type = ARCHITECTURES[architecture]
    keys = _Keys(file, architecture)
    if keys.get("expert_count", int, 0) and architecture != "qwen3moe":
        raise CheckpointError(f"{path} is a mixture of experts of {architecture}; of these qwen3moe is supported")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path} has no token_embd.weight: it is not a whole language model")
    hidden_size, num_heads = keys.size("embedding_length"), keys.size("attention.head_count")
    config: dict = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden_size,
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", num_heads),
        "head_dim": keys.size("attention.key_length", hidden_size // num_heads),
        "hidden_act": "silu",
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon", float, 1e-6),
        "max_position_embeddings": keys.size("context_length"),
        "rope_theta": keys.get("rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(file, tensors, keys),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(metadata),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if architecture == "qwen3moe":
        config |= {
            "num_experts": keys.size("expert_count"),
            "num_experts_per_tok": keys.size("expert_used_count"),
            "moe_intermediate_size": keys.size("expert_feed_forward_length"),
            "norm_topk_prob": True,  # of all Qwen3; files do not say it
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    _check_head_rows(path, tensors, config)
    return config


def _check_head_rows(path: Path, tensors: Mapping[str, _Placed], config: dict) -> None:
    """Rows that are put in order come in whole heads of an even width; a file that lies about it is refused."""
    for name, heads in (("attn_q", config["num_attention_heads"]), ("attn_k", config["num_key_value_heads"])):
        for stored_name, tensor in tensors.items():
            if stored_name.endswith((f".{name}.weight", f".{name}.bias")) and tensor.shape[0] % (2 * heads):
                raise CheckpointError(f"{path}: {stored_name} has {tensor.shape[0]} rows for {heads} heads")


def _end_tokens(metadata: Mapping[str, object]) -> int | list[int] | None:
    ids = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    found = list(dict.fromkeys(token_id for token_id in ids if isinstance(token_id, int)))
    return found if len(found) > 1 else found[0] if found else None


def _rope_scaling(file: GgufFile, tensors: Mapping[str, _Placed], keys: _Keys) -> dict | None:
    kind = file.metadata.get(f"{file.metadata['general.architecture']}.rope.scaling.type", "none")
    if ROPE_FREQUENCIES in tensors:
        return _llama3_scaling(tensors[ROPE_FREQUENCIES], keys)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{file.mapped.path} scales its positions by {kind!r}; linear, yarn and llama3 are known")
    scaling: dict = {"rope_type": kind, "factor": keys.get("rope.scaling.factor", float, 1.0)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.size("rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(tensor: _Placed, keys: _Keys) -> dict:
    """The rule that gives the factors the file lists: Llama 3's constants, checked against every factor."""
    data = tensor.file.bytes_at(tensor.offset, tensor.size_bytes)
    factors = dequantize(_aligned(data), tensor.format, tensor.shape[-1]).double().flatten()
    theta = keys.get("rope.freq_base", float, 10000.0)
    assert isinstance(theta, (int, float))
    original, low, high, factor = 8192, 1.0, 4.0, float(factors.max())
    wavelengths = 2 * torch.pi * theta ** (torch.arange(len(factors), dtype=torch.float64) / len(factors))
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(factors, expected, rtol=1e-3):
        raise CheckpointError(f"{tensor.file.path}: {ROPE_FREQUENCIES} follows no rule that is known (Llama 3's)")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
