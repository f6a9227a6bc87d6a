"""Token embeddings out of a table, media embeddings into token rows; kernels in csrc/kernels/embedding."""

from torch import Tensor

from tilewright.ops.backend import op
from tilewright.ops.linear import PackedWeight
from tilewright.ops.native import kernels, view
from tilewright.ops.plan import empty


@op
def embedding(
    ids: Tensor,
    table: Tensor | PackedWeight,
    *,
    first: int = 0,
    num_ids: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """table[ids] [T, D] for ids [T] int64 or int32 and table [V, D]. A bad id raises ValueError naming it.

    The table may be a packed linear weight: a language model head that is tied to the embedding is kept once, in the
    layout the head wants. It may be a part of `num_ids` rows, those from `first` on: the others are zeros.
    """
    if isinstance(table, PackedWeight):
        if out is None:
            out = empty((ids.shape[0], table.k), table.dtype)
        kernels.embedding_packed(view(ids), table.native(), first, table.n if num_ids is None else num_ids, view(out))
        return out
    if out is None:
        out = empty((ids.shape[0], table.shape[1]), table.dtype)
    kernels.embedding(view(ids), view(table), first, len(table) if num_ids is None else num_ids, view(out))
    return out


@op
def scatter_rows(out: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """out [T, D] after out[rows] = values, for rows [M] int64 and values [M, D].

    A row out of range or named twice raises ValueError.
    """
    kernels.scatter_rows(view(out), view(rows), view(values), False)
    return out


@op
def scatter_add_rows(out: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """out [T, D] after out[rows] += values, summed in fp32 and rounded once. A row named twice raises ValueError."""
    kernels.scatter_rows(view(out), view(rows), view(values), True)
    return out
