"""Values that requests bring, checked and written as the media buffer keeps them."""

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
    """What a model makes of a medium whose grid is known."""

    num_rows: int  # patches or mel frames, which its encoder reads
    row_width: int
    num_features: int
    feature_width: int
    encoder_rows: int
    num_states: int = 0  # of a model whose tokens attend to features


@dataclass(frozen=True)
class PreparedValues:
    """Values of the right shape and in the buffer's dtype, and the key that caches know them by."""

    values: Tensor  # [rows, width]
    key: bytes

    def num_buffer_rows(self, buffer_width: int) -> int:
        """How many rows of the media buffer they fill, one value after the other."""
        return -(-self.values.numel() // buffer_width)

    def write(self, rows: Tensor) -> None:
        rows.view(-1)[: self.values.numel()] = self.values.view(-1)

    def part(self, begin: int, end: int) -> PreparedValues:
        """The rows [begin, end), by themselves."""
        return PreparedValues(self.values[begin:end], content_key(self.key, "part", begin, end))


def prepare(
    given: Precomputed, sizes: ValueSizes, name: str, limits: MediaLimits, dtype: torch.dtype
) -> PreparedValues:
    """The values as the buffer keeps them; RequestError where they are not of the sizes that the grid has."""
    found = _tensor(given, name, limits)
    expected = (sizes.num_features, sizes.feature_width) if given.is_encoded else (sizes.num_rows, sizes.row_width)
    if tuple(found.shape) != expected:
        raise RequestError(
            f"{name}: {given.type} has the shape {list(found.shape)}, expected {list(expected)} for a grid of "
            f"{given.grid}"
        )
    found = found.detach().cpu().contiguous()
    if given.key is not None and given.key != (key := _key_of(found, given).hex()):
        raise RequestError(f"{name}: key is {given.key}, and that of {given.type} as it arrived is {key}")
    values = found.to(dtype)
    if not values.isfinite().all():
        raise RequestError(f"{name}: {given.type} has values that are not finite, expected numbers")
    # Of what is kept: the same values in a wider dtype are the same to caches.
    return PreparedValues(values, _key_of(values, given))


def as_json(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part whose values are a tensor, as clients of a server send it."""
    values: Tensor = part[part["type"]].detach().cpu().contiguous()
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in part.items()}
    told = {"dtype": _name(values.dtype), "shape": list(values.shape)}
    return {**plain, **told, part["type"]: base64.b64encode(_bytes(values)).decode()}


def checksum(given: Precomputed) -> str:
    """What a part may say as its "key", so that values which are damaged on their way are refused."""
    return _key_of(given.values.detach().cpu().contiguous(), given).hex()


def _key_of(values: Tensor, given: Precomputed) -> bytes:
    """A hash of all that a model sees of them."""
    return content_key(_bytes(values), given.type, given.grid, given.tiling, given.times_s, _name(values.dtype))


def _bytes(values: Tensor) -> bytes:
    return values.view(torch.uint8).numpy().tobytes()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor(given: Precomputed, name: str, limits: MediaLimits) -> Tensor:
    """The values as a tensor, of two dimensions and not too large."""
    if isinstance(given.values, bytes):
        # A copy: torch takes no memory that cannot be written.
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
