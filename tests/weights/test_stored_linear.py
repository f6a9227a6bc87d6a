"""Weights of published checkpoints, read in parts as ranks do: the rows are those of the whole."""

import pytest
import torch
from published import CompressedPacked

from tilewright.ops.quantized import dequantize
from tilewright.weights.stored_linear import PackedInts, Tensors


@pytest.mark.parametrize("begin,end", [(0, 24), (0, 5), (3, 11), (8, 16), (13, 24)])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [64, 512])  # the latter is stored as two groups of 256 each
def test_rows_of_packed_ints(group, zeros, begin, end):
    tensors, expected = CompressedPacked(group, zeros=zeros).module(24, 1024)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    weight = PackedInts(
        Tensors("part", lambda name: tensors[name.removeprefix("part.")], shapes),
        bits=4,
        is_symmetric=not zeros,
        rounds_x=True,
        group_size=group,
    )
    assert weight.format[1] == min(group, 256)
    torch.testing.assert_close(dequantize(weight.rows(begin, end)).double(), expected[begin:end], rtol=1e-6, atol=0)
