"""Precomputed media: an encoder's inputs or features, with their grid. Imports no torch.

    {"type": "image_features", "image_features": [features, width], "grid": (1, rows, columns)}

Values are a tensor or array of real numbers, or their bytes (little-endian, row by row; base64 over HTTP) with "dtype"
and "shape". They are stored in the media buffer like other media, and their cache key is a hash of the values: features
of one client are never used for another one's image (inputs/precomputed_values.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tilewright.inputs.media import MediaLimits, decode_base64
from tilewright.types import MediaKind, RequestError

MAX_SIDE = 2**31 - 1
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class ValueType(NamedTuple):
    kind: MediaKind
    is_encoded: bool  # features; False: the encoder's inputs
    grid: str  # the meaning of the grid's three numbers, for errors


TYPES = {
    "pixel_values": ValueType("image", False, "(1, rows, columns) of patches"),
    "image_features": ValueType("image", True, "(1, rows, columns) of patches"),
    "pixel_values_videos": ValueType("video", False, "(groups of frames, rows, columns) of patches"),
    "video_features": ValueType("video", True, "(groups of frames, rows, columns) of patches"),
    "mel_frames": ValueType("audio", False, "(1, mel frames, mel bins)"),
    "audio_features": ValueType("audio", True, "(1, mel frames, mel bins)"),
}


@dataclass(frozen=True)
class Precomputed:
    """A part's values, not yet checked against the model."""

    type: str  # one of TYPES
    values: Any  # a tensor or array; or bytes, with `dtype` and `shape`
    grid: tuple[int, int, int]
    dtype: str = ""
    shape: tuple[int, int] = (0, 0)
    tiling: tuple[int, int] = (1, 1)  # rows and columns of an image's tiles
    times_s: tuple[float, ...] = ()  # of each group of a video's frames
    key: str | None = None  # the expected checksum of the values

    @property
    def kind(self) -> MediaKind:
        return TYPES[self.type].kind

    @property
    def is_encoded(self) -> bool:
        return TYPES[self.type].is_encoded

    @property
    def size_bytes(self) -> int:
        return len(self.values) if isinstance(self.values, bytes) else int(getattr(self.values, "nbytes", 0))


def type_of(part: Mapping[str, Any]) -> str | None:
    """Return the part's type if it is one of TYPES, else None."""
    found = part.get("type")
    return found if isinstance(found, str) and found in TYPES else None


def check_allowed(value_type: str, name: str, limits: MediaLimits) -> None:
    """Raise RequestError if the limits do not allow precomputed values."""
    if not limits.allow_precomputed:
        what = {"image": "image", "video": "video", "audio": "sound"}[TYPES[value_type].kind]
        raise RequestError(f"{name}: {value_type} are accepted with --allow-precomputed only: send the {what}")


def check_bytes_told(part: Mapping[str, Any], name: str, limits: MediaLimits) -> None:
    """Raise RequestError if dtype and shape do not match the values' size, which is known before decoding.

    Values are bytes or base64.
    """
    value_type, dtype = part["type"], part.get("dtype")
    shape: Any = _plain(part.get("shape"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise RequestError(f"{name}: dtype is {dtype!r:.60}, expected {', '.join(ITEM_BYTES)}")
    if not _are_sides(shape, 2):
        raise RequestError(f"{name}: shape is {shape!r:.60}, expected [rows, width]")
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if expected > limits.max_bytes:
        raise RequestError(f"{name}: {value_type} takes {expected} bytes, the limit is {limits.max_bytes}")
    values = part[value_type]
    # Four base64 characters encode three bytes; the last ones may be "=".
    found = len(values) if isinstance(values, bytes) else len(values) // 4 * 3 - values[-2:].count("=")
    if found != expected:
        raise RequestError(
            f"{name}: {value_type} has {found} bytes, expected {expected}: shape {list(shape)} in {dtype}"
        )


def precomputed_of(part: Mapping[str, Any], name: str, limits: MediaLimits) -> Precomputed:
    """Return the precomputed values of a part whose type is one of TYPES."""
    value_type = part["type"]
    check_allowed(value_type, name, limits)
    values: Any = part.get(value_type)
    told: dict[str, Any] = {}
    if isinstance(values, str | bytes):
        check_bytes_told(part, name, limits)
        told = {"dtype": part["dtype"], "shape": tuple(_plain(part["shape"]))}
        if isinstance(values, str):
            values = decode_base64(values, name, value_type)
    return Precomputed(
        value_type,
        values,
        _grid_of(part, name),
        tiling=_tiling_of(part, name),
        times_s=_times_of(part, name),
        key=_key_of(part, name),
        **told,
    )


def _grid_of(part: Mapping[str, Any], name: str) -> tuple[int, int, int]:
    grid = _plain(part.get("grid"))
    if not _are_sides(grid, 3):
        raise RequestError(f"{name}: grid is {grid!r:.60}, expected {TYPES[part['type']].grid}")
    first, rows, columns = grid
    return first, rows, columns


def _tiling_of(part: Mapping[str, Any], name: str) -> tuple[int, int]:
    tiling = _plain(part.get("tiling", (1, 1)))
    if not _are_sides(tiling, 2):
        raise RequestError(f"{name}: tiling is {tiling!r:.60}, expected (rows, columns) of tiles")
    rows, columns = tiling
    return rows, columns


def _times_of(part: Mapping[str, Any], name: str) -> tuple[float, ...]:
    times = _plain(part.get("times_s", ()))
    are_numbers = isinstance(times, list | tuple) and all(
        isinstance(time, int | float) and not isinstance(time, bool) and 0 <= time <= MAX_SIDE for time in times
    )
    if not are_numbers or sorted(times) != list(times):
        raise RequestError(f"{name}: times_s is {times!r:.60}, expected seconds in order, one for each group of frames")
    return tuple(float(time) for time in times)


def _key_of(part: Mapping[str, Any], name: str) -> str | None:
    key = part.get("key")
    if key is not None and not (isinstance(key, str) and re.fullmatch("[0-9a-f]{32}", key)):
        raise RequestError(f"{name}: key is {key!r:.60}, expected 32 hexadecimal digits")
    return key


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _are_sides(value: Any, count: int) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == count
        and all(isinstance(side, int) and not isinstance(side, bool) and 0 < side <= MAX_SIDE for side in value)
    )
