"""torch's products in bf16 on a CPU that has no instructions for them: its own loops are a thousand times slower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
PRODUCTS = {
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.matmul, aten.linear, aten.einsum,
    aten._grouped_mm, aten.convolution, aten.conv1d, aten.conv2d, aten.conv3d, aten.scaled_dot_product_attention,
}  # fmt: skip
WITH_SUMS = aten._scaled_dot_product_flash_attention_for_cpu  # of exp, beside the result; they are fp32


class _ProductsInFp32(TorchDispatchMode):
    """Products of bf16 are computed in fp32 and rounded once, which is what instructions for them do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args = args, kwargs or {}
        is_product = func.overloadpacket in PRODUCTS or func.overloadpacket is WITH_SUMS
        is_bf16 = any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bfloat16 for leaf in tree_leaves(args))
        if not is_product or not is_bf16:
            return func(*args[0], **args[1])
        given, named = tree_map_only(torch.Tensor, lambda x: x.float() if x.is_floating_point() else x, args)
        found = func(*given, **named)
        return (found[0].bfloat16(), *found[1:]) if isinstance(found, tuple) else found.bfloat16()


@contextmanager
def quick_products() -> Iterator[None]:
    """For what a test computes with torch in bf16, on this thread; nothing where the CPU has the instructions."""
    with nullcontext() if torch.ops.mkldnn._is_mkldnn_bf16_supported() else _ProductsInFp32():
        yield
