"""The components of a folder in diffusers' layout: model_index.json lists them, each has its own folder.

Networks are loaded when first used. With `low_memory` they are released when their stage ends, so that at most the
largest of them is in memory; packed weights are mapped again from the pack cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tilewright import config as settings
from tilewright.diffusion.params import Limits
from tilewright.host import files
from tilewright.host.files import CheckpointError, read_json, read_optional_json
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.layers import partition
from tilewright.layers.partition import Partition
from tilewright.ops import backend
from tilewright.parallel.group import Group, SingleGroup
from tilewright.types import RequestError, UnsupportedConfig
from tilewright.weights import embedded, hub, layer_stream
from tilewright.weights.cache import DamagedEntryError, EntryCheck
from tilewright.weights.checkpoint import Checkpoint
from tilewright.weights.load import DTYPES, LoadReport, load
from tilewright.weights.safetensors import SafetensorsCheckpoint

_log = logging.getLogger(__name__)

LARGE_BYTES = 2 << 30  # size of a component: Wan's transformers are published in fp32, but were trained in bf16


Builders = Mapping[str, Callable[[Mapping[str, Any]], Any]]  # by component: what makes its network of its config


class Components:
    """The networks, tokenizers and configs of a pipeline."""

    def __init__(
        self,
        model: str | Path,
        builders: Builders,
        *,
        dtype: str = "auto",
        group: Group | None = None,
        low_memory: bool = False,
        stream_layers: int | None = None,
        pack_cache: bool = True,
        progress: bool = False,
    ) -> None:
        """Open the folder; `stream_layers`: bytes for a network's layers, the others being read as they compute."""
        if dtype != "auto" and dtype not in DTYPES:
            raise RequestError(f"dtype is {dtype!r}, expected auto, {' or '.join(DTYPES)}")
        self.folder = pipeline_folder(model)
        self.index = read_json(self.folder / "model_index.json")
        self.low_memory = low_memory
        self.group = group or SingleGroup()
        self.loading_s = 0.0  # total so far
        self.reports: dict[str, LoadReport] = {}
        self._dtype = dtype
        self._builders = builders
        self._stream_bytes = stream_layers
        self._pack_cache = pack_cache and not embedded.is_embedded(self.folder)
        if stream_layers is not None and self._cache_dir() is None:
            raise RequestError(
                "stream_layers reads layers from the pack cache, expected native kernels, pack_cache, "
                "TILEWRIGHT_CACHE_DIR not off, and no embedded model"
            )
        self._progress = progress
        self._networks: dict[str, Any] = {}
        self._num_users: Counter[str] = Counter()
        self._checks: dict[str, EntryCheck] = {}  # background checks of mapped weights
        self._damage: DamagedEntryError | None = None

    @property
    def class_name(self) -> str:
        """Class of the pipeline."""
        return str(self.index.get("_class_name"))

    def has(self, name: str) -> bool:
        """Return whether the pipeline has this component: entries may be null."""
        entry = self.index.get(name)
        return isinstance(entry, list) and len(entry) == 2 and entry[1] is not None

    def path(self, name: str) -> Path:
        """Return the folder of a component."""
        folder = self.folder / name
        if not self.has(name) or not folder.is_dir():
            raise CheckpointError(f"{self.folder} has no {name}, which a {self.class_name} needs: download it again")
        return folder

    def config(self, name: str) -> dict[str, Any]:
        """Return a component's config without null entries."""
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        return {key: value for key, value in read_json(self.path(name) / file).items() if value is not None}

    def with_defaults(self, limits: Limits) -> Limits:
        """Return the limits with the defaults of the folder's generation_config.json, if it has one.

        `max_side` and `max_pixels` there bound the images that the model was trained for: no request may exceed them,
        even if the networks could.
        """
        stored = read_optional_json(self.folder / "generation_config.json")
        defaults = {"width", "height", "num_steps", "guidance", "num_frames"}
        bounds = {"max_side", "max_pixels"}
        if unknown := stored.keys() - defaults - bounds:
            raise CheckpointError(
                f"{self.folder / 'generation_config.json'} has {', '.join(sorted(unknown))}, expected some of "
                f"{', '.join(sorted(defaults | bounds))}"
            )
        for name in bounds & stored.keys():
            least, most = {"max_side": limits.min_side, "max_pixels": limits.min_side**2}[name], getattr(limits, name)
            if type(stored[name]) is not int or not least <= stored[name] <= most:
                raise CheckpointError(
                    f"{self.folder / 'generation_config.json'}: {name} is {stored[name]!r:.100}, expected an integer "
                    f"from {least} to {most}"
                )
        field = {"num_steps": "default_steps", "num_frames": "default_frames", **{name: name for name in bounds}}
        given = {field.get(name, f"default_{name}"): value for name, value in stored.items()}
        limits = dataclasses.replace(limits, **given)
        try:
            limits.params("", image=True if limits.needs_image else None)
        except RequestError as error:  # the defaults themselves are out of range
            raise CheckpointError(f"{self.folder / 'generation_config.json'}: {error}") from error
        return limits

    def tokenizer(self, name: str = "tokenizer") -> Tokenizer:
        return Tokenizer.from_folder(self.path(name))

    def dtype(self, name: str) -> torch.dtype:
        """Return the compute type of a component: the requested one, or that of most of its tensors."""
        if self._dtype != "auto":
            return DTYPES[self._dtype]
        return stored_dtype(SafetensorsCheckpoint(self.path(name)))

    def stored_bytes(self) -> int:
        """Return the size of all networks as stored."""
        return sum(
            path.stat().st_size
            for name in self._builders
            if self.has(name)
            for path in self.path(name).glob("*.safetensors")
        )

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[Any]:
        """Provide a component's network, loading it if needed; in low-memory mode it is released afterwards."""
        if self._damage is not None:
            raise self._damage
        network = self._networks.get(name)
        if network is None:
            network = self._networks[name] = self._load(name)
        self._num_users[name] += 1
        try:
            yield network
        finally:
            del network
            self._num_users[name] -= 1
            if self.low_memory and not self._num_users[name]:
                del self._networks[name]
                gc.collect()  # layers and their caches may refer to each other

    def is_loaded(self, name: str) -> bool:
        return name in self._networks

    def release(self) -> None:
        """Release all networks."""
        self._networks.clear()
        gc.collect()

    def close(self) -> None:
        self.release()
        for check in self._checks.values():
            check.close()

    def _cache_dir(self) -> Path | None:
        return settings.current().cache_dir if self._pack_cache and backend.active() == "native" else None

    def _load(self, name: str) -> Any:
        begin_s = time.perf_counter()
        network = self._mapped(name)
        if self._stream_bytes is not None:
            if not self.reports[name].from_cache:  # just packed, in memory: from here on it is in the cache
                del network
                network = self._mapped(name)
            if not self.reports[name].from_cache:
                raise CheckpointError(f"{name} cannot be streamed: its packed weights are not in the pack cache")
            layer_stream.stream_layers(network, self._stream_bytes)
        unchecked = self.reports[name].unchecked
        if unchecked is not None and name not in self._checks:
            self._checks[name] = EntryCheck(unchecked, self._note_damage)
        self.loading_s += time.perf_counter() - begin_s
        return network

    def _mapped(self, name: str) -> Any:
        """Return a component's network with its weights, mapped from the pack cache if they are there."""
        folder = self.path(name)
        checkpoint = SafetensorsCheckpoint(folder)
        with partition.use(Partition(self.group)) as parts:
            try:
                network = self._builders[name](checkpoint.config)
            except UnsupportedConfig as error:
                raise UnsupportedConfig(f"{name}: {error}") from error
        parts.warn()
        dtype = stored_dtype(checkpoint) if self._dtype == "auto" else DTYPES[self._dtype]
        size_bytes = sum(map(checkpoint.size_bytes, checkpoint.shapes))
        if self._dtype == "auto" and dtype == torch.float32 and size_bytes > LARGE_BYTES:
            _log.warning(
                "%s is stored and computed in float32; dtype bfloat16 takes half of its %.0f GB, and half the time",
                name,
                size_bytes / 1e9,
            )
        self.reports[name] = load(
            network,
            checkpoint,
            dtype=dtype,
            rename=network.checkpoint_name,
            cache_dir=self._cache_dir(),
            progress=self._progress,
            is_streamed=self._stream_bytes is not None,
        )
        return network

    def _note_damage(self, error: DamagedEntryError) -> None:
        self._damage = error


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return fp32 if most of the checkpoint is, else bf16."""
    sizes = {name: checkpoint.size_bytes(name) for name in checkpoint.shapes}
    wide = sum(size for name, size in sizes.items() if checkpoint.dtype(name) == torch.float32)
    return torch.float32 if 2 * wide > sum(sizes.values()) else torch.bfloat16


def pipeline_folder(model: str | Path) -> Path:
    """Return the folder that `model` names, downloaded if it is a hub id; CheckpointError if it is no pipeline."""
    path = hub.find(model, "a folder or a hub id") or hub.download_pipeline(str(model))
    if not files.exists(path / "model_index.json"):
        raise CheckpointError(
            f"{path} has no model_index.json: expected a pipeline in diffusers' layout, which makes images or video"
        )
    return path
