"""torch's products in bf16 on a CPU that has no instructions for them: its own loops are hundreds of times slower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
PRODUCTS = {
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.matmul, aten.linear, aten.einsum, aten._grouped_mm,
    aten.convolution, aten.conv1d, aten.conv2d, aten.conv3d, aten.scaled_dot_product_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
}  # fmt: skip


class _ProductsInFp32(TorchDispatchMode):
    """Products of bf16 are computed in fp32 and rounded once, which is what instructions for them do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        every = args, kwargs or {}
        if func.overloadpacket not in PRODUCTS or not any(map(_is_bf16, tree_leaves(every))):
            return func(*every[0], **every[1])
        given, named = tree_map_only(torch.Tensor, lambda x: x.float() if x.is_floating_point() else x, every)
        found = func(*given, **named)
        # Attention's second result, for gradients, is fp32 in any case.
        return (found[0].bfloat16(), *found[1:]) if isinstance(found, tuple) else found.bfloat16()


def _is_bf16(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16


@contextmanager
def quick_products() -> Iterator[None]:
    """For what a test computes with torch in bf16, on this thread; nothing where the CPU has the instructions."""
    with nullcontext() if torch.ops.mkldnn._is_mkldnn_bf16_supported() else _ProductsInFp32():
        yield
