"""Fills a model's weights from a checkpoint: strictly, and with little memory beside the weights themselves."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from tilewright.host.memory import require_room, trim_heap
from tilewright.ops import backend
from tilewright.ops.linear import PackedWeight
from tilewright.ops.packed import Packed
from tilewright.ops.quantized import QuantFormat, Quantized
from tilewright.weights.cache import ChecksummedData, PackedCache
from tilewright.weights.checkpoint import Checkpoint, CheckpointError
from tilewright.weights.quantized import WHAT_TO_DO, quantized_format
from tilewright.weights.spec import Weight, iter_weights

_log = logging.getLogger(__name__)

LOADABLE = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # compute types by name

MAX_LISTED = 20  # per kind of mismatch: a wrong model misses hundreds, and the first ones say enough


@dataclass(frozen=True)
class LoadReport:
    """The result of loading."""

    num_tensors: int  # tensors of the checkpoint that the model uses
    source_bytes: int  # their size in the checkpoint's files
    ignored: tuple[str, ...]  # tensors of the checkpoint that `rename` leaves out
    cache_path: Path | None  # file of the packed weights, existing or planned; None: no cache
    from_cache: bool
    unchecked: ChecksummedData | None  # weights of the cache that were only compared in part
    seconds: float
    bytes_by_format: Mapping[str, int]  # size in memory by format: "int4 in groups of 32", "bfloat16"

    @property
    def packed_as(self) -> str:
        """The sizes by format in words: "int8 0.4 GB, bfloat16 0.1 GB"."""
        return ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in self.bytes_by_format.items())


def _same_name(name: str) -> str | None:
    return name


def load(
    model: object,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    rename: Callable[[str], str | None] = _same_name,
    cache_dir: Path | None = None,
    progress: bool = False,
    keep_quants: bool = True,
    is_streamed: bool = False,
) -> LoadReport:
    """Fill every weight of `model` from the checkpoint, in `dtype`, and return a report.

    `rename` returns the model's name for a tensor of the checkpoint, None to leave it out. Missing and unexpected
    tensors, and wrong shapes or types, are listed in one CheckpointError. `cache_dir`: folder of the pack cache
    (`weights.cache`), None for none. `progress` shows a bar on a terminal. `keep_quants`: multiply with the quants of
    quantised tensors if kernels have their format; else with their values in `dtype`. `is_streamed`: packed weights of
    the cache are mapped and not read.
    """
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype is {dtype}, expected one of {', '.join(map(str, DTYPES.values()))}")
    start_s = time.perf_counter()
    weights = list(iter_weights(model))
    stored_names, ignored = _stored_names(checkpoint, rename)
    _check(weights, checkpoint, stored_names)
    if keep_quants:
        for weight in weights:
            weight.keep_quants([checkpoint.quantized_as(stored_names[source.name]) for source in weight.sources])
    names = {stored_names[source.name] for weight in weights for source in weight.sources}
    source_bytes = sum(checkpoint.size_bytes(name) for name in names)
    cache, from_cache = None, False
    if cache_dir is not None:
        in_order = [stored_names[source.name] for weight in weights for source in weight.sources]
        cache = PackedCache(cache_dir, weights, checkpoint.path, checkpoint.fingerprint, dtype, f"{in_order}")
        if (stored_bytes := cache.stored_bytes()) is not None:
            with _progress_bar(stored_bytes, progress) as bar:
                from_cache = cache.restore(bar.update, is_streamed)
    if not from_cache:
        if backend.place().is_host:
            require_room(f"{checkpoint.path}", _expected_bytes(weights, dtype))
        _build(weights, checkpoint, stored_names, dtype, progress)
        if cache is not None:
            cache.store()
    return LoadReport(
        num_tensors=len(names),
        source_bytes=source_bytes,
        ignored=ignored,
        cache_path=cache.path if cache else None,
        from_cache=from_cache,
        unchecked=cache.unchecked if cache and from_cache else None,
        seconds=time.perf_counter() - start_s,
        bytes_by_format=_bytes_by_format(weights),
    )


def _expected_bytes(weights: Iterable[Weight], dtype: torch.dtype) -> int:
    """Return roughly the size of the packed weights."""
    total_bytes = 0.0
    for weight in weights:
        form: QuantFormat | None = getattr(weight, "quantized_as", None)
        value_bytes: float = dtype.itemsize if form is None else 1.0 if "8" in form[0] else 0.5
        total_bytes += value_bytes * sum(math.prod(source.own_shape) for source in weight.sources)
    return int(total_bytes)


def _bytes_by_format(weights: Iterable[Weight]) -> dict[str, int]:
    """Return the size of all weights' tensors by packed format, or by type if they are not packed, largest first."""
    sizes: dict[str, int] = {}

    def add(value: object) -> None:
        if isinstance(value, Packed):
            name = str(value.form.format)
            sizes[name] = sizes.get(name, 0) + value.size_bytes
            if isinstance(value, PackedWeight) and value.next is not None:
                add(value.next)
        elif isinstance(value, Tensor):
            name = str(value.dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + value.nbytes
        elif isinstance(value, tuple):
            for item in value:
                add(item)
        elif is_dataclass(value):
            for field in fields(value):
                add(getattr(value, field.name))

    for weight in weights:
        add(weight.value)
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _stored_names(
    checkpoint: Checkpoint, rename: Callable[[str], str | None]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the checkpoint's name for each of the model's names, and the names that `rename` leaves out."""
    stored_names: dict[str, str] = {}
    ignored = []
    for stored_name in checkpoint.shapes:
        name = rename(stored_name)
        if name is None:
            ignored.append(stored_name)
        elif name in stored_names:
            raise CheckpointError(f"the checkpoint has {name} twice, as {stored_names[name]} and as {stored_name}")
        else:
            stored_names[name] = stored_name
    return stored_names, tuple(ignored)


def _check(weights: Iterable[Weight], checkpoint: Checkpoint, stored_names: dict[str, str]) -> None:
    """Raise a CheckpointError that lists every tensor in which model and checkpoint differ."""
    sources = {source.name: source for weight in weights for source in weight.sources}
    missing = [f"{source.name} {list(source.shape)}" for name, source in sources.items() if name not in stored_names]
    extra = [
        f"{stored_name} {list(checkpoint.shapes[stored_name])}"
        for name, stored_name in stored_names.items()
        if name not in sources and not _adds_nothing(checkpoint, stored_name)
    ]
    shapes, types = [], []
    for name, source in sources.items():
        if name not in stored_names:
            continue
        shape = tuple(checkpoint.shapes[stored_names[name]])
        stored_dtype = checkpoint.dtype(stored_names[name])
        if shape != source.shape:
            shapes.append(f"{stored_names[name]} {list(shape)}, expected {list(source.shape)}")
        if stored_dtype not in LOADABLE:
            types.append(f"{stored_names[name]} {stored_dtype}".replace("torch.", ""))
    kinds = [
        ("missing", missing),
        ("of no use to the model", extra),
        ("of another shape", shapes),
        ("of a type other than float32, float16 and bfloat16", types),
    ]
    found = [f"{len(items)} tensors {kind}:\n{_listed(items)}" for kind, items in kinds if items]
    is_read = any(checkpoint.quantized_as(name) for name in checkpoint.shapes)
    quantized = None if is_read else quantized_format(checkpoint.config, checkpoint.shapes.keys())
    if found and quantized is not None:
        raise CheckpointError(f"{checkpoint.path} is quantised as {quantized}, which is not supported; {WHAT_TO_DO}")
    if found:
        raise CheckpointError("the checkpoint does not fit the model its config describes\n" + "\n".join(found))


def _adds_nothing(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a tensor is a zero bias beside a quantised weight: some tools give one to every module."""
    module, _, end = name.rpartition(".")
    weight = f"{module}.weight"
    if end != "bias" or weight not in checkpoint.shapes or checkpoint.quantized_as(weight) is None:
        return False
    return not bool(checkpoint.read(name).any())


def _listed(items: list[str]) -> str:
    lines = [f"  {item}" for item in items[:MAX_LISTED]]
    if len(items) > MAX_LISTED:
        lines.append(f"  and {len(items) - MAX_LISTED} more")
    return "\n".join(lines)


class _TensorReader:
    """A `spec.Reader` of a checkpoint's tensor, which releases the pages of a block when the next one is read.

    A NaN raises a CheckpointError: it would spread to some answers only, and nobody would know why. Infinities are
    logged once per tensor: some masks have them.
    """

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self._has_warned = False
        self.shape = tuple(checkpoint.shapes[name])

    def read(self) -> Tensor:
        return self._checked(_widened(self._checkpoint.read(self._name)))

    def rows(self, begin: int, end: int) -> Tensor:
        self._checkpoint.release(self._name)
        return self._checked(_widened(self._checkpoint.rows(self._name, begin, end)))

    def quantized_rows(self, begin: int, end: int) -> Quantized:
        self._checkpoint.release(self._name)
        return self._checkpoint.quantized_rows(self._name, begin, end)

    def _checked(self, tensor: Tensor) -> Tensor:
        if _is_finite(tensor):
            return tensor
        if num_nan := int(tensor.isnan().sum()):
            raise CheckpointError(
                f"{self._checkpoint.path}: the tensor {self._name} has {num_nan} NaN among {tensor.numel()} values: "
                "its file is damaged, or it was saved by a training that had failed; download it again"
            )
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s: the tensor %s has infinite values", self._checkpoint.path, self._name)
        return tensor


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all bf16 or fp32 values are finite.

    By their bits: an exponent of ones makes a value the largest of its sign, read as a signed integer if it is positive
    and as an unsigned one if it is negative. Two maxima of integers take 0.1 s per GB, 3 % of packing.
    """
    if tensor.numel() == 0:
        return True
    signed, unsigned, infinity = _BITS[tensor.dtype]
    bits = tensor.view(signed).numpy()
    sign = 1 << (8 * tensor.element_size() - 1)
    return bool(bits.max() < infinity and bits.view(unsigned).max() < sign + infinity)


_BITS = {torch.bfloat16: (torch.int16, np.uint16, 0x7F80), torch.float32: (torch.int32, np.uint32, 0x7F80_0000)}


def _widened(tensor: Tensor) -> Tensor:
    """Return fp16 as fp32, which has all its values: the kernels support fp32 and bf16."""
    return tensor.float() if tensor.dtype == torch.float16 else tensor


def _build(
    weights: Sequence[Weight], checkpoint: Checkpoint, stored_names: dict[str, str], dtype: torch.dtype, progress: bool
) -> None:
    names_of = [[stored_names[source.name] for source in weight.sources] for weight in weights]
    # A tensor used by two weights is read twice, and counts twice.
    with _progress_bar(sum(checkpoint.size_bytes(name) for names in names_of for name in names), progress) as bar:
        for weight, names in zip(weights, names_of, strict=True):
            weight.fill([_TensorReader(checkpoint, name) for name in names], dtype)
            for name in names:
                checkpoint.release(name)
                bar.update(checkpoint.size_bytes(name))
            trim_heap()


def _progress_bar(total_bytes: int, progress: bool) -> tqdm:
    # disable=None: tqdm shows a bar on a terminal only.
    return tqdm(total=total_bytes, desc="loading", unit="B", unit_scale=True, disable=None if progress else True)
