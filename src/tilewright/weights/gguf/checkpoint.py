"""GGUF files of language models as checkpoints: their config and tensor names in Hugging Face's terms.

A model that sees comes as two files: the language model, and a projector beside it (`gguf/projector.py`).

Quantised tensors are decoded when read, or split into their quants (`gguf/quants.py`). The llama architecture stores q
and k rows in the order of the older rotary embedding, which rotates neighbours instead of halves: reading reorders
them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tilewright.host.files import CheckpointError, exists
from tilewright.ops.quantized import QuantFormat, Quantized
from tilewright.weights.gguf.config import (
    ROPE_FREQUENCIES,
    known_architecture,
    multimodal_config,
    num_deepstack_layers,
    text_config,
)
from tilewright.weights.gguf.file import GgufFile, PlacedTensor
from tilewright.weights.gguf.projector import NO_PROJECTOR, FrameTensors, Projector, find_projector
from tilewright.weights.gguf.quants import SPLITS

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

    A layer's experts, one tensor in the file, are separate tensors here.
    """

    files: Path | None = None
    missing: str | None = None

    def __init__(self, path: Path, mmproj: str | Path | None = None) -> None:
        """Open the file; `mmproj` names the projector, "none" for text only, None for the fitting one beside it."""
        self.path = path
        files = _parts(path)
        tensors = _all_tensors(files)
        self.config: dict = text_config(files[0], tensors)
        projector = self._read_projector(files[0], mmproj)
        self.tokenizer_metadata: Mapping[str, object] | None = {
            key: value for key, value in files[0].metadata.items() if key.startswith("tokenizer.")
        }
        self._tensors: dict[str, PlacedTensor | FrameTensors] = {}
        for name, placed in tensors.items():
            if name != ROPE_FREQUENCIES:
                self._tensors |= _named(name, placed)
        if projector is not None:
            self._tensors = {
                _multimodal_name(name): tensor for name, tensor in self._tensors.items()
            } | projector.tensors
            files = [*files, projector.file]
        self.shapes: Mapping[str, tuple[int, ...]] = {name: placed.shape for name, placed in self._tensors.items()}
        digest = hashlib.sha256()
        for file in files:
            mapped = file.mapped
            digest.update(f"{mapped.path.name} {mapped.size_bytes} {mapped.modified_ns} ".encode())
            digest.update(mapped.memory[: file.header_bytes])
        self.fingerprint = digest.hexdigest()

    def _read_projector(self, file: GgufFile, mmproj: str | Path | None) -> Projector | None:
        """Return the projector of a model that sees, and update the config; else None, and set `missing`."""
        name, architecture = known_architecture(file)
        if architecture.seeing is None:
            if mmproj not in (None, NO_PROJECTOR):
                raise CheckpointError(f"mmproj is {mmproj}, and {self.path} is of {name}, which sees no images")
            return None
        projector = find_projector(self.path, mmproj, self.config["hidden_size"], num_deepstack_layers(file))
        if projector is None:
            what = "projector, the file that images go through"
            self.missing = (
                f"{self.path.name} was opened with mmproj none, without its {what}"
                if mmproj == NO_PROJECTOR
                else f"{self.path.name} has no {what}: put the model's mmproj-*.gguf into the same folder, or name it "
                "with --mmproj"
            )
            return None
        self.config = multimodal_config(file, self.config, projector.config, projector.preprocessing)
        return projector

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def size_bytes(self, name: str) -> int:
        return self._tensors[name].size_bytes

    def read(self, name: str) -> Tensor:
        """Return the tensor: in place for F32, F16 and BF16 unless its rows are reordered, else decoded to fp32."""
        return self.rows(name, 0, self._tensors[name].shape[0])

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Return rows [begin, end) of its first axis."""
        tensor = self._tensors[name]
        num_heads = self._num_permuted_heads(name)
        if num_heads is None:
            return tensor.rows(begin, end)
        # Whole heads are read, reordered and cut.
        head_rows = tensor.shape[0] // num_heads
        first, last = begin // head_rows, -(-end // head_rows)
        heads = tensor.rows(first * head_rows, last * head_rows)
        return _in_order(heads, head_rows)[begin - first * head_rows : end - first * head_rows]

    def quantized_as(self, name: str) -> QuantFormat | None:
        """Return the format of a matrix's quants; None if it has none that kernels multiply."""
        tensor = self._tensors[name]
        split = SPLITS.get(tensor.format.name) if isinstance(tensor, PlacedTensor) else None
        return None if split is None or len(tensor.shape) != 2 else split.format

    def quantized_rows(self, name: str, begin: int, end: int) -> Quantized:
        """Return rows [begin, end) of a matrix in that format."""
        tensor = self._tensors[name]
        assert isinstance(tensor, PlacedTensor)  # others have no such format
        num_heads = self._num_permuted_heads(name)
        head_rows = 1 if num_heads is None else tensor.shape[0] // num_heads
        first, last = begin // head_rows * head_rows, -(-end // head_rows) * head_rows
        try:
            whole = SPLITS[tensor.format.name].rows(tensor.stored(first, last), last - first)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {name}: {error}") from error

        def cut(part: Tensor) -> Tensor:
            return (part if num_heads is None else _in_order(part, head_rows))[begin - first : end - first]

        mins = None if whole.mins is None else cut(whole.mins)
        return Quantized(whole.name, cut(whole.values), cut(whole.scales), mins, whole.group_size)

    def release(self, name: str) -> None:
        """Release the tensor's pages."""
        self._tensors[name].release()

    def _num_permuted_heads(self, name: str) -> int | None:
        if self.config["model_type"] != "llama":
            return None
        if ".self_attn.q_proj." in name:
            return self.config["num_attention_heads"]
        if ".self_attn.k_proj." in name:
            return self.config["num_key_value_heads"]
        return None


def _parts(path: Path) -> list[GgufFile]:
    """Return the file, or all the parts it belongs to, in order."""
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
    missing = [part.name for part in paths if not exists(part)]
    if missing:
        raise CheckpointError(f"{path} is one of {count} parts, and {', '.join(missing[:5])} is missing: download it")
    files = [file if part == path else GgufFile(part) for part in paths]
    for number, part in enumerate(files):
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, count):
            raise CheckpointError(f"{part.mapped.path} is not marked as part {number + 1} of {count}")
    return files


def _all_tensors(files: Sequence[GgufFile]) -> dict[str, PlacedTensor]:
    found: dict[str, PlacedTensor] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in found:
                raise CheckpointError(f"{file.mapped.path} has the tensor {name}, as an earlier part has")
            found[name] = tensor
    stated = files[0].metadata.get("split.tensors.count", len(found))
    if stated != len(found):
        raise CheckpointError(f"{files[0].mapped.path} and its parts have {len(found)} tensors, expected {stated}")
    return found


def _named(name: str, placed: PlacedTensor) -> dict[str, PlacedTensor]:
    """Return a tensor under Hugging Face's name; all experts of a layer as a tensor each."""
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
    """Reorder rows of whole heads, whose two halves alternate in the file."""
    return rows.view(-1, head_rows // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def huggingface_name(name: str) -> str:
    """Return a tensor's Hugging Face name; an unknown name is unchanged, so that loading reports it."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def _multimodal_name(name: str) -> str:
    """Return the name that a language model's tensor has in a model that sees."""
    return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name
