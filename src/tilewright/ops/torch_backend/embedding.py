"""Token embeddings out of a table, media embeddings into token rows."""

from torch import Tensor

from tilewright.ops.linear import PackedWeight
from tilewright.ops.torch_backend.common import into
from tilewright.ops.torch_backend.packed import rows_of


def embedding(ids: Tensor, table: Tensor | PackedWeight, *, out: Tensor | None = None) -> Tensor:
    rows = rows_of(table) if isinstance(table, PackedWeight) else table
    return into(out, rows[ids.long()])


def scatter_rows(out: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    out[rows] = values
    return out


def scatter_add_rows(out: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    out[rows] = (out[rows].float() + values.float()).to(out.dtype)
    return out
