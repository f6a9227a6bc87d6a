"""Chooses the formats of a model's packed weights while it is built: each product asks.

    with precision.use(precision.named("int4")):
        model = family.build(config, shapes)

Small or sensitive weights stay in the model's own type: norms, position tables, patch embeddings, the router of experts
and its shared gate, the gates b and a of delta nets.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from tilewright.layers.partition import ThreadSetting
from tilewright.ops.quantized import QuantFormat
from tilewright.types import RequestError


@dataclass(frozen=True)
class Precision:
    """Formats of a model's weights; None is the model's own type.

    `products` is the format of linears and experts, `head` that of the output head, also if it is the embedding table.
    `sensitive`, if given, is that of linears where an error costs most: attention of text decoders, all of their first
    and last layer, and the down projections of narrow ones.
    """

    products: QuantFormat | None = None
    head: QuantFormat | None = None
    sensitive: QuantFormat | None = None
    keeps_quants: bool = True  # quantised tensors of a checkpoint keep their quants, unless `products` says otherwise

    @property
    def block(self) -> int:
        """The number of columns that share a scale: ranks that split a model keep them together."""
        return max(format[1] for format in (self.products, self.head, self.sensitive, ("", 1)) if format is not None)

    @property
    def for_sensitive(self) -> Precision:
        """The precision of the most sensitive linears."""
        return self if self.sensitive is None else replace(self, products=self.sensitive)


# The head has a row per vocabulary token, and an error there chooses another token: 8 bits at least.
_NAMED = {
    # Rotated, since outliers, those of activations above all, spoil whole rows: without it int8 costs ten times the
    # divergence. Groups would take as long as their products on machines with tiles.
    "int8": Precision(("int8_rotated", 0), ("int8_rotated", 0)),
    # Groups with bases and whole-number steps, so that prompts are products of bytes. Attention is a small part of
    # layers, and more than half of the divergence.
    "int4": Precision(("int4_rotated", 32), ("int8_rotated", 0), sensitive=("int8_rotated", 0)),
    "fp8": Precision(("fp8", 128), ("fp8", 128)),
    "none": Precision(keeps_quants=False),
}


def named(name: str | None) -> Precision:
    """Return the precision named by `quantize`, except "auto" (engine/load/loading.py).

    None: weights stay as in the checkpoint, quantised or not.
    """
    if name is not None and name not in _NAMED:
        raise RequestError(f"quantize is {name!r}, expected {', '.join(_NAMED)} or auto")
    return Precision() if name is None else _NAMED[name]


_setting = ThreadSetting(Precision)


def current() -> Precision:
    """Return the precision of layers that this thread builds; nothing is quantised outside `use`."""
    return _setting.current()


def use(precision: Precision) -> AbstractContextManager[Precision]:
    return _setting.use(precision)
