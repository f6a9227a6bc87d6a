"""Projector files (mmproj) of GGUF models that see: the vision tower, found beside the language model.

Qwen3-VL's are supported. Their layout is that of llama.cpp's converter: q, k and v are one tensor in Hugging Face's
order; a patch embedding tensor for each of its two frames; deepstack mergers by the block whose output they read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.host.files import CheckpointError, exists
from tilewright.weights.gguf.config import PROJECTOR_ARCHITECTURE, Keys
from tilewright.weights.gguf.file import GgufFile, PlacedTensor, architecture_of

NO_PROJECTOR = "none"  # as mmproj: no projector is looked for
KIND = "qwen3vl_merger"
NUM_CHANNELS = 3  # red, green, blue

_PREFIX = "model.visual"
_PATCH_FRAMES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
_PATCH_WEIGHT = f"{_PREFIX}.patch_embed.proj.weight"
_POSITIONS = "v.position_embd.weight"
_NAMES = {
    "v.patch_embd": "patch_embed.proj",
    "v.position_embd": "pos_embed",
    "v.post_ln": "merger.norm",
    "mm.0": "merger.linear_fc1",
    "mm.2": "merger.linear_fc2",
}
_BLOCK_NAMES = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}
_MERGER_NAMES = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_DEEPSTACK = re.compile(r"v\.deepstack\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class FrameTensors:
    """A kernel [D, C, frames, P, P] that the file has as a tensor [D, C, P, P] for each frame."""

    frames: tuple[PlacedTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        outputs, channels, *patch = self.frames[0].shape
        return (outputs, channels, len(self.frames), *patch)

    @property
    def dtype(self) -> torch.dtype:
        """The frames' type; fp32 if they differ."""
        found = {frame.dtype for frame in self.frames}
        return found.pop() if len(found) == 1 else torch.float32

    @property
    def size_bytes(self) -> int:
        return sum(frame.size_bytes for frame in self.frames)

    def rows(self, begin: int, end: int) -> Tensor:
        """Return rows [begin, end) of the first axis."""
        return torch.stack([frame.rows(begin, end).to(self.dtype) for frame in self.frames], dim=2)

    def release(self) -> None:
        for frame in self.frames:
            frame.release()


class Projector:
    """A projector file of Qwen3-VL: its config and tensors under Hugging Face's names."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        self._check_kind()
        self._keys = Keys(self.file, PROJECTOR_ARCHITECTURE)
        found = (_DEEPSTACK.fullmatch(name) for name in self.file.tensors)
        self._deepstack_layers = sorted({int(match[1]) for match in found if match})
        self.config = self._read_config()
        self.preprocessing = self._read_preprocessing()
        self.tensors = self._named_tensors()

    @property
    def path(self) -> Path:
        return self.file.mapped.path

    def check_fit(self, model: Path, width: int, num_deepstack_layers: int | None) -> None:
        """Raise CheckpointError unless its features fit the language model."""
        own_width, own_layers = self.config["out_hidden_size"], len(self._deepstack_layers)
        if own_width != width:
            raise CheckpointError(
                f"{self.path} makes features {own_width} wide, but {model.name} expects {width}: it is the projector "
                "of another size of model"
            )
        if num_deepstack_layers not in (None, own_layers):
            raise CheckpointError(
                f"{self.path} makes features of {own_layers} of its layers beside the last, but {model.name} expects "
                f"{num_deepstack_layers}: it is the projector of another model"
            )

    def _check_kind(self) -> None:
        metadata = self.file.metadata
        architecture = metadata.get("general.architecture")
        if architecture != PROJECTOR_ARCHITECTURE:
            raise CheckpointError(
                f"{self.path} has the architecture {architecture!r}, expected {PROJECTOR_ARCHITECTURE!r}, which "
                "projector files have"
            )
        kind = metadata.get("clip.projector_type", metadata.get("clip.vision.projector_type"))
        if metadata.get("clip.has_audio_encoder"):
            raise CheckpointError(f"{self.path} is a projector of sound too; only those of images are supported")
        if kind != KIND:
            raise CheckpointError(f"{self.path} is a projector of the kind {kind!r}; {KIND!r} is supported, Qwen3-VL's")
        if metadata.get("clip.use_gelu") is not True:
            raise CheckpointError(f"{self.path} has no clip.use_gelu that is true, which the layers of {KIND} compute")

    def _read_config(self) -> dict:
        """Return the vision_config of config.json.

        attention.layer_norm_epsilon is not read: converters write the language model's there, and the tower's is fixed.
        """
        keys, width = self._keys, self._keys.size("vision.embedding_length")
        patch, positions = (self._tensor(name) for name in (_PATCH_FRAMES[0], _POSITIONS))
        patch_size, num_heads = keys.size("vision.patch_size"), keys.size("vision.attention.head_count")
        second = self._tensor(_PATCH_FRAMES[1])
        if second.shape != patch.shape or patch.shape[1:] != (NUM_CHANNELS, patch_size, patch_size):
            raise CheckpointError(
                f"{self.path}: {_PATCH_FRAMES[0]} is {list(patch.shape)} and {_PATCH_FRAMES[1]} {list(second.shape)}, "
                f"expected two kernels of {NUM_CHANNELS} x {patch_size} x {patch_size}"
            )
        if math.isqrt(positions.shape[0]) ** 2 != positions.shape[0]:
            raise CheckpointError(f"{self.path}: {_POSITIONS} has {positions.shape[0]} rows, expected a square number")
        return {
            "depth": keys.size("vision.block_count"),
            "hidden_size": width,
            "num_heads": num_heads,
            "head_dim": keys.size("vision.attention.head_dim", width // num_heads),
            "intermediate_size": keys.size("vision.feed_forward_length"),
            "out_hidden_size": keys.size("vision.projection_dim"),
            "patch_size": patch_size,
            "spatial_merge_size": keys.size("vision.spatial_merge_size", 2),
            "temporal_patch_size": len(_PATCH_FRAMES),
            "in_channels": NUM_CHANNELS,
            "num_position_embeddings": positions.shape[0],
            "deepstack_visual_indexes": self._deepstack_layers,
            "hidden_act": "gelu_pytorch_tanh",  # the meaning of use_gelu in this format
        }

    def _read_preprocessing(self) -> dict:
        """Return the entries of preprocessor_config.json that the file has."""
        mean, std = (self._keys.numbers(f"vision.image_{name}", 3) for name in ("mean", "std"))
        if not all(math.isfinite(value) for value in (*mean, *std)) or not all(std):
            raise CheckpointError(
                f"{self.path}: images have the mean {mean} and the deviation {std}, expected numbers, and no "
                "deviation of 0"
            )
        sizes = {
            key: self._keys.size(f"vision.image_{key}")
            for key in ("min_pixels", "max_pixels")
            if f"clip.vision.image_{key}" in self.file.metadata
        }
        return {"image_mean": mean, "image_std": std, **sizes}

    def _tensor(self, name: str) -> PlacedTensor:
        if name not in self.file.tensors:
            raise CheckpointError(f"{self.path} has no {name}: it is not a whole projector of {KIND}")
        return self.file.tensors[name]

    def _named_tensors(self) -> dict[str, PlacedTensor | FrameTensors]:
        found: dict[str, PlacedTensor | FrameTensors] = {
            self._huggingface_name(name): tensor
            for name, tensor in self.file.tensors.items()
            if name not in _PATCH_FRAMES
        }
        return found | {_PATCH_WEIGHT: FrameTensors(tuple(self._tensor(name) for name in _PATCH_FRAMES))}

    def _huggingface_name(self, name: str) -> str:
        """Return a tensor's Hugging Face name; an unknown name is unchanged, so that loading reports it."""
        block = re.fullmatch(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if block and block[2] in _BLOCK_NAMES:
            return f"{_PREFIX}.blocks.{block[1]}.{_BLOCK_NAMES[block[2]]}.{block[3]}"
        merger = _DEEPSTACK.fullmatch(name)
        if merger and merger[2] in _MERGER_NAMES:
            place = self._deepstack_layers.index(int(merger[1]))
            return f"{_PREFIX}.deepstack_merger_list.{place}.{_MERGER_NAMES[merger[2]]}.{merger[3]}"
        stem, _, kind = name.rpartition(".")
        return f"{_PREFIX}.{_NAMES[stem]}.{kind}" if stem in _NAMES else name


def find_projector(
    model: Path, mmproj: str | Path | None, width: int, num_deepstack_layers: int | None
) -> Projector | None:
    """Return the projector that fits a language model; None if there is none, or `mmproj` is "none".

    `mmproj` is its path, relative to here or to the model's folder; None: the fitting one in that folder.
    """
    if mmproj == NO_PROJECTOR:
        return None
    if mmproj is not None:
        return _fitting(_named_path(model, mmproj), model, width, num_deepstack_layers)
    paths = _beside(model)
    fitting, reasons = [], []
    for path in paths:
        try:
            fitting.append(_fitting(path, model, width, num_deepstack_layers))
        except CheckpointError as error:
            reasons.append(str(error))
    if len(fitting) == 1 or not paths:
        return fitting[0] if fitting else None
    if fitting:
        names = ", ".join(projector.path.name for projector in fitting)
        raise CheckpointError(
            f"{model} has {len(fitting)} projectors beside it that fit, {names}: name one of them with --mmproj"
        )
    raise CheckpointError(
        f"{'; '.join(reasons)}; name the projector of {model.name} with --mmproj, or --mmproj {NO_PROJECTOR} to read "
        "text alone"
    )


def _fitting(path: Path, model: Path, width: int, num_deepstack_layers: int | None) -> Projector:
    projector = Projector(path)
    projector.check_fit(model, width, num_deepstack_layers)
    return projector


def _named_path(model: Path, mmproj: str | Path) -> Path:
    path = Path(mmproj).expanduser()
    found = next((place for place in (path, model.parent / path) if exists(place)), None)
    if found is None:
        names = ", ".join(place.name for place in _beside(model)) or "none"
        raise CheckpointError(f"mmproj is {mmproj}, which does not exist; projectors beside {model.name}: {names}")
    return found


def _beside(model: Path) -> Sequence[Path]:
    """Return the projectors in a model's folder."""
    return [path for path in sorted(model.parent.glob("*.gguf")) if path != model and _is_projector(path)]


def _is_projector(path: Path) -> bool:
    try:
        return architecture_of(path) == PROJECTOR_ARCHITECTURE
    except CheckpointError:
        # Damage to another model's file is ignored here; a projector's is reported when it is opened.
        return "mmproj" in path.name.lower()
