"""Token embeddings out of a table, media embeddings into token rows."""

import torch
from torch import Tensor

from tilewright.ops.linear import PackedWeight
from tilewright.ops.torch_backend.common import into
from tilewright.ops.torch_backend.packed import rows_of, unpacked


def embedding(
    ids: Tensor,
    table: Tensor | PackedWeight,
    *,
    first: int = 0,
    num_ids: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    if isinstance(table, PackedWeight) and table.form.format.is_quantized:
        rows = unpacked(table)
    else:
        rows = rows_of(table) if isinstance(table, PackedWeight) else table
    if num_ids is None:
        return into(out, rows[ids.long()])
    own = ids.long() - first
    is_own = (own >= 0) & (own < len(rows))
    return into(out, torch.where(is_own[:, None], rows[own.clamp(0, len(rows) - 1)], 0))


def scatter_rows(out: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    out[rows] = values
    return out


def scatter_add_rows(out: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    out[rows] = (out[rows].float() + values.float()).to(out.dtype)
    return out
