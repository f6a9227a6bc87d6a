"""Checks precomputed values of requests and writes them to the media buffer."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.inputs.media import MediaLimits, content_key
from tilewright.inputs.precomputed import Precomputed
from tilewright.types import RequestError


@dataclass(frozen=True)
class ValueSizes:
    """Sizes of a model's inputs and features for a medium of a given grid."""

    num_rows: int  # patches or mel frames that the encoder reads
    row_width: int
    num_features: int
    feature_width: int
    encoder_rows: int
    num_states: int = 0  # encoder states, of models with cross-attention


@dataclass(frozen=True)
class PreparedValues:
    """Values of the right shape in the buffer's dtype, and their cache key."""

    values: Tensor  # [rows, width]
    key: bytes

    def num_buffer_rows(self, buffer_width: int) -> int:
        """Return the number of rows of the media buffer that the values fill contiguously."""
        return -(-self.values.numel() // buffer_width)

    def write(self, rows: Tensor) -> None:
        rows.view(-1)[: self.values.numel()] = self.values.view(-1)

    def part(self, begin: int, end: int) -> PreparedValues:
        """Return the rows [begin, end), with a key of their own."""
        return PreparedValues(self.values[begin:end], content_key(self.key, "part", begin, end))


def prepare(
    given: Precomputed, sizes: ValueSizes, name: str, limits: MediaLimits, dtype: torch.dtype
) -> PreparedValues:
    """Return the values in the buffer's dtype; raise RequestError if their shape does not match the grid."""
    found = _tensor(given, name, limits)
    expected = (sizes.num_features, sizes.feature_width) if given.is_encoded else (sizes.num_rows, sizes.row_width)
    if tuple(found.shape) != expected:
        raise RequestError(
            f"{name}: {given.type} has the shape {list(found.shape)}, expected {list(expected)} for a grid of "
            f"{given.grid}"
        )
    found = found.detach().cpu().contiguous()
    if given.key is not None and given.key != (key := _key_of(found, given).hex()):
        raise RequestError(f"{name}: key is {given.key}, but the checksum of {given.type} is {key}")
    values = found.to(dtype)
    if not values.isfinite().all():
        raise RequestError(f"{name}: {given.type} has values that are not finite, expected numbers")
    # The key is that of the converted values: equal values in a wider dtype share it.
    return PreparedValues(values, _key_of(values, given))


def as_json(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON form, for a server, of a part whose values are a tensor."""
    values: Tensor = part[part["type"]].detach().cpu().contiguous()
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in part.items()}
    told = {"dtype": _name(values.dtype), "shape": list(values.shape)}
    return {**plain, **told, part["type"]: base64.b64encode(_bytes(values)).decode()}


def checksum(given: Precomputed) -> str:
    """Return the checksum for a part's "key", with which values damaged in transit are refused."""
    return _key_of(given.values.detach().cpu().contiguous(), given).hex()


def _key_of(values: Tensor, given: Precomputed) -> bytes:
    """Return a hash of everything that a model reads of the values."""
    return content_key(_bytes(values), given.type, given.grid, given.tiling, given.times_s, _name(values.dtype))


def _bytes(values: Tensor) -> bytes:
    return values.view(torch.uint8).numpy().tobytes()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor(given: Precomputed, name: str, limits: MediaLimits) -> Tensor:
    """Return the values as a tensor; raise RequestError unless it is real, two-dimensional and not too large."""
    if isinstance(given.values, bytes):
        # A copy: torch requires writable memory.
        return torch.frombuffer(bytearray(given.values), dtype=getattr(torch, given.dtype)).view(given.shape)
    try:
        tensor = torch.as_tensor(given.values)
    except (TypeError, ValueError, RuntimeError) as error:
        found = type(given.values).__name__
        raise RequestError(f"{name}: {given.type} is a {found}, expected a tensor or array [rows, width]") from error
    if not tensor.is_floating_point() or tensor.dim() != 2:
        found = f"{_name(tensor.dtype)} of shape {list(tensor.shape)}"
        raise RequestError(f"{name}: {given.type} is {found}, expected real numbers of shape [rows, width]")
    if tensor.nbytes > limits.max_bytes:
        raise RequestError(f"{name}: {given.type} takes {tensor.nbytes} bytes, the limit is {limits.max_bytes}")
    return tensor
