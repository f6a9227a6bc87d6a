"""Token and media embeddings, rotary position embedding; kernels in csrc/kernels/{embedding,rope}.

R is the rotated width of a head (R <= K), so there are R/2 frequencies. The position of a frequency is data:
`axis_of_frequency` [R/2] has each frequency's row of `positions` [A, T], and the functions at the end build it for each
kind of rope.
"""

import torch
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
    """Return table[ids] [T, D] for ids [T] int64 or int32 and table [V, D]. A bad id raises ValueError naming it.

    The table may be a packed linear weight: a head that is tied to the embedding is stored once, in the head's layout.
    It may be a part of `num_ids` rows, those from `first` on: others give zeros.
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
    """Set out[rows] = values for out [T, D], rows [M] int64 and values [M, D], and return out.

    A row out of range or named twice raises ValueError.
    """
    kernels.scatter_rows(view(out), view(rows), view(values), False)
    return out


@op
def scatter_add_rows(out: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Add values to out[rows] in fp32, rounded once, and return out [T, D]. A row named twice raises ValueError."""
    kernels.scatter_rows(view(out), view(rows), view(values), True)
    return out


@op
def rope_table(
    positions: Tensor,
    inv_freq: Tensor,
    axis_of_frequency: Tensor,
    attention_scaling: float = 1.0,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, fp32 [T, R/2] each, of positions[axis_of_frequency[j], t] * inv_freq[j], times scaling.

    positions [A, T] int64 or fp32, inv_freq [R/2] fp32, axis_of_frequency [R/2] int32. Absolute error under 1.2e-7 for
    angles up to a million.
    """
    if out is None:
        shape = (positions.shape[-1], inv_freq.shape[0])
        out = empty(shape, torch.float32), empty(shape, torch.float32)
    cos, sin = out
    kernels.rope_table(
        view(positions), view(inv_freq), view(axis_of_frequency), view(cos), view(sin), attention_scaling
    )
    return cos, sin


@op
def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, out: Tensor | None = None) -> Tensor:
    """Return x [T, H, K] with each head's first R elements rotated by cos, sin [T, R/2]; the rest is copied.

    Pairs are (j, j + R/2), or (2j, 2j + 1) when `interleaved`. x may be a slice of a packed qkv; `out` may be x.
    """
    if out is None:
        out = empty(x.shape, x.dtype)
    kernels.rope(view(x), view(cos), view(sin), view(out), interleaved)
    return out


@op
def rope_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """Rotate q [T, H, K] and k [T, G, K] in place, in one pass over the tokens."""
    kernels.qk_norm_rope(view(q), view(k), None, None, view(cos), view(sin), 0.0, False, interleaved)


@op
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    weight_plus_one: bool = False,
    interleaved: bool = False,
) -> None:
    """RMS-norm each head of q [T, H, K] and k [T, G, K] with a weight [K], then rotate it: in place, rounded once."""
    kernels.qk_norm_rope(
        view(q),
        view(k),
        view(q_weight),
        view(k_weight),
        view(cos),
        view(sin),
        eps,
        weight_plus_one,
        interleaved,
    )


def plain_axes(num_frequencies: int) -> Tensor:
    """Return axes for one position per token, which rotates every frequency."""
    return torch.zeros(num_frequencies, dtype=torch.int32)


def sectioned_axes(mrope_section: list[int]) -> Tensor:
    """Return the axes of Qwen2-VL's M-RoPE: the first section's frequencies for time, then row, then column."""
    return torch.repeat_interleave(torch.arange(len(mrope_section)), torch.tensor(mrope_section)).to(torch.int32)


def interleaved_axes(mrope_section: list[int]) -> Tensor:
    """Return the axes of Qwen3-VL's M-RoPE: time, row, column in turn for each section's size, then time."""
    axes = torch.zeros(sum(mrope_section), dtype=torch.int32)
    for axis in range(1, len(mrope_section)):
        axes[axis : mrope_section[axis] * len(mrope_section) : len(mrope_section)] = axis
    return axes


def vision_axes(num_frequencies_per_axis: int) -> Tensor:
    """Return the axes of 2-D rope: one set of frequencies for the row, then the same set for the column."""
    return torch.arange(2, dtype=torch.int32).repeat_interleave(num_frequencies_per_axis)
