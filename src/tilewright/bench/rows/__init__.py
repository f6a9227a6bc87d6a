"""The rows of the kernel benchmark, in a file per family of ops; a new function of rows needs a line here."""

from collections.abc import Iterator

from tilewright.bench.row import Row
from tilewright.bench.rows import attention, elementwise, gated_delta, linear, media, tokens

FAMILIES = (
    linear.linear_rows,
    linear.moe_rows,
    attention.attention_rows,
    media.conv_rows,
    gated_delta.gated_delta_rows,
    elementwise.norm_rows,
    elementwise.group_norm_rows,
    elementwise.ada_norm_rows,
    attention.rope_rows,
    elementwise.activation_rows,
    tokens.embedding_rows,
    media.image_rows,
    media.mel_rows,
    tokens.sample_rows,
)


def all_rows() -> Iterator[Row]:
    """Yield every row without its tensors, which Row.prepare makes."""
    for rows in FAMILIES:
        yield from rows()
