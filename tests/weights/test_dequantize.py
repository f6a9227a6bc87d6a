"""Every GGUF type against the reference implementation of the format, bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from tilewright.weights.dequantize import FORMATS, dequantize

COLUMNS = 512


def quantized_rows(number: int) -> np.ndarray:
    """Bytes [rows, row bytes]: of random values where the reference can quantise, else random with sane scales."""
    generator = np.random.default_rng(number)
    kind = gguf.GGMLQuantizationType(number)
    values = generator.standard_normal((37, COLUMNS)).astype(np.float32)
    try:
        return quants.quantize(values, kind).view(np.uint8).reshape(37, -1)
    except NotImplementedError:
        stored = FORMATS[number]
        blocks = generator.integers(0, 256, (37 * COLUMNS // stored.block_elements, stored.block_bytes), dtype=np.uint8)
        # Random bytes as fp16 would be infinite now and then: the scales are made, all other bytes are random.
        at = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}[stored.name]
        for offset in at:
            scale = generator.uniform(-2, 2, len(blocks)).astype(np.float16)
            blocks[:, offset : offset + 2] = scale.view(np.uint8).reshape(-1, 2)
        return blocks.reshape(37, -1)


@pytest.mark.parametrize("number", FORMATS, ids=lambda number: FORMATS[number].name)
def test_same_as_the_reference(number):
    stored = FORMATS[number]
    kind = gguf.GGMLQuantizationType(number)
    assert kind.name == stored.name and gguf.GGML_QUANT_SIZES[kind] == (stored.block_elements, stored.block_bytes)
    data = quantized_rows(number)
    assert data.shape[1] == stored.row_bytes(COLUMNS)
    expected = quants.dequantize(data, kind).reshape(37, COLUMNS)
    got = dequantize(torch.from_numpy(data.copy()).view(-1), stored, COLUMNS)
    assert got.dtype == stored.dtype
    assert len(np.unique(expected)) > 10  # something to compare
    assert np.array_equal(got.float().numpy(), expected)
