"""In which formats the weights of a model are packed, while it is built: each product asks.

    with precision.use(precision.named("int4")):
        model = family.build(config, shapes)

What is small or steers much stays in the model's own type: norms, position tables, patch embeddings, the router of
experts and its shared gate, the gates b and a of delta nets.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from tilewright.layers.partition import ThreadSetting
from tilewright.types import RequestError

# A quantised format and how many values of a row share a scale, 0 for all of them, as `ops.packed.weight_format` takes
# them; None: the model's own type.
Format = tuple[str, int]


@dataclass(frozen=True)
class Precision:
    """`products` is the format of linears and experts, `head` that of the output head, also where it is the table of
    token embeddings too. `careful`, if there is one, is that of linears where an error costs most: attention of text
    decoders, all of their first and last layer, and the down projections of narrow ones."""

    products: Format | None = None
    head: Format | None = None
    careful: Format | None = None
    keeps_quants: bool = True  # those of quantised tensors of a checkpoint, where `products` says nothing else

    @property
    def block(self) -> int:
        """Columns that share a scale: ranks that split a model keep them together."""
        return max(format[1] for format in (self.products, self.head, self.careful, ("", 1)) if format is not None)

    @property
    def with_care(self) -> Precision:
        """That of what an error in costs most."""
        return self if self.careful is None else replace(self, products=self.careful)


# The head's rows are as many as the vocabulary's, and an error there chooses another token: 8 bits at least.
_NAMED = {
    # Rotated, since values that stand out, those of activations most of all, spoil whole rows: without it they cost ten
    # times the divergence. Groups cost as much as their products take, where there are tiles.
    "int8": Precision(("int8_rotated", 0), ("int8_rotated", 0)),
    # Groups with bases, and of whole steps, so that prompts are products of bytes. Attention is a small part of layers,
    # and of the divergence more than half.
    "int4": Precision(("int4_rotated", 32), ("int8_rotated", 0), careful=("int8_rotated", 0)),
    "fp8": Precision(("fp8", 128), ("fp8", 128)),
    "none": Precision(keeps_quants=False),
}


def named(name: str | None) -> Precision:
    """What `quantize` names, but for "auto" (engine/load/loading.py).

    None: weights stay as the checkpoint has them, quantised or not.
    """
    if name is not None and name not in _NAMED:
        raise RequestError(f"quantize is {name!r}, expected {', '.join(_NAMED)} or auto")
    return Precision() if name is None else _NAMED[name]


_setting = ThreadSetting(Precision)


def current() -> Precision:
    """That of layers which this thread builds; nothing is quantised unless `use` says otherwise."""
    return _setting.current()


def use(precision: Precision) -> AbstractContextManager[Precision]:
    return _setting.use(precision)
