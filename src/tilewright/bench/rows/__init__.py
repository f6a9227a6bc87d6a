"""The rows, one file per op family; a new family is a file with `rows()` and a line here."""

from collections.abc import Iterator

from tilewright.bench.row import Row
from tilewright.bench.rows import (
    activation,
    ada_norm,
    attention,
    conv3d,
    embedding,
    gated_delta,
    group_norm,
    image,
    linear,
    mel,
    moe,
    norm,
    rope,
    sample,
)

FAMILIES = (
    linear,
    moe,
    attention,
    conv3d,
    gated_delta,
    norm,
    group_norm,
    ada_norm,
    rope,
    activation,
    embedding,
    image,
    mel,
    sample,
)


def all_rows() -> Iterator[Row]:
    """Every row, cheap to make: tensors come with Row.prepare."""
    for family in FAMILIES:
        yield from family.rows()
