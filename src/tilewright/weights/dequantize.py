"""Decodes GGUF's blocks of quantised weights to fp32.

Every format cuts a row into blocks of 32 or 256 elements, each with its own scale. Of a run of bytes, the low nibbles
come first and the high ones after them. d and m are fp16; products and sums are fp32, in the order of the format's own
reference, so that results are equal to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright import config
from tilewright.ops.quantized import TABLES

# Elements per chunk: they stay in L2, and torch uses no threads of its own for them. One barrier per torch operation
# over whole rows took 20 times as long on a shared machine.
_CHUNK_ELEMENTS = 32768


@dataclass(frozen=True)
class GgufFormat:
    """Storage of one of GGUF's tensor types, and its decoder."""

    name: str
    block_elements: int
    block_bytes: int
    dtype: torch.dtype  # of the result
    decode: Callable[[Tensor, Tensor], None] | None = (
        None  # bytes [B, block_bytes] -> out [B, block_elements]; None: as is
    )

    def row_bytes(self, num_columns: int) -> int:
        return num_columns // self.block_elements * self.block_bytes


def dequantize(data: Tensor, quantization: GgufFormat, num_columns: int) -> Tensor:
    """Return rows [R, num_columns] from uint8 [R * row bytes]; a view if the type needs no decoding."""
    if quantization.decode is None:
        return data.view(quantization.dtype).view(-1, num_columns)
    blocks = data.view(-1, quantization.block_bytes)
    out = torch.empty(len(blocks), quantization.block_elements)
    step = _CHUNK_ELEMENTS // quantization.block_elements
    # The results are read, so that a chunk's error is raised here.
    list(_workers().map(quantization.decode, blocks.split(step), out.split(step)))
    return out.view(-1, num_columns)


@functools.cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(config.current().team_size, "dequantize")


def half(blocks: Tensor, offset: int) -> Tensor:
    """Return the fp16 at byte `offset` of each block, as fp32 [B, 1]."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def _nibbles(quants: Tensor, out: Tensor) -> None:
    """Write the low, then the high nibbles of quants [B, n] to out [B, 2, n]."""
    out[:, 0] = quants & 15
    out[:, 1] = quants >> 4


def _add_fifth_bits(blocks: Tensor, offset: int, out: Tensor) -> None:
    """Add 16 to the elements of out [B, 32] whose bit is set in the 32 bits at `offset`."""
    words = blocks[:, offset : offset + 4].contiguous().view(torch.int32)
    out.add_(words >> torch.arange(32, dtype=torch.int32) & 1, alpha=16)


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(half(blocks, 0))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out.view(-1, 2, 16))
    out.sub_(8).mul_(half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], out.view(-1, 2, 16))
    out.mul_(half(blocks, 0)).add_(half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 6:], out.view(-1, 2, 16))
    _add_fifth_bits(blocks, 2, out)
    out.sub_(16).mul_(half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 8:], out.view(-1, 2, 16))
    _add_fifth_bits(blocks, 4, out)
    out.mul_(half(blocks, 0)).add_(half(blocks, 2))


def scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return d * scale and dmin * minimum [B, 8, 1] of Q4_K and Q5_K: eight pairs of 6 bits in 12 bytes from byte 4 on.

    The first four pairs are the low 6 bits of bytes 0-3 and 4-7. The last four have their low 4 bits in bytes 8-11,
    scale in the low nibble and minimum in the high one, and their high 2 bits on top of bytes 0-3 and 4-7.
    """
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], 1)
    minima = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)
    return (half(blocks, 0) * scales)[..., None], (half(blocks, 2) * minima)[..., None]


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = scales_and_minima(blocks)
    _nibbles(blocks[:, 16:].reshape(-1, 32), out.view(-1, 2, 32))
    out.view(-1, 8, 32).mul_(scales).sub_(minima)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = scales_and_minima(blocks)
    _nibbles(blocks[:, 48:].reshape(-1, 32), out.view(-1, 2, 32))
    # Bit j of byte l is the fifth bit of element l of the j-th group of 32.
    bits = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    out.view(-1, 8, 32).add_(bits, alpha=16).mul_(scales).sub_(minima)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    # Two halves of 128: 64 bytes of nibbles, and 32 bytes with two more bits for each of four groups of 32.
    _nibbles(blocks[:, :128].reshape(-1, 64), out.view(-1, 2, 64))
    upper = blocks[:, 128:192].reshape(-1, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    out.view(-1, 4, 32).add_(upper, alpha=16).sub_(32)
    scales = half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    out.view(-1, 16, 16).mul_(scales[..., None])


def power_of_two(blocks: Tensor) -> Tensor:
    """Return the scale of MXFP4's doubled values, fp32 [B, 1]: half of 2^(e - 127), where e is the first byte."""
    return torch.exp2(blocks[:, :1].float() - 128)


def _of_table(name: str, offset: int, scale: Callable[[Tensor], Tensor], blocks: Tensor, out: Tensor) -> None:
    codes = torch.empty_like(out, dtype=torch.uint8)
    _nibbles(blocks[:, offset:], codes.view(-1, 2, 16))
    table = torch.tensor(TABLES[name], dtype=torch.float32)
    torch.mul(table[codes.int()], scale(blocks), out=out)


def _iq4_nl(blocks: Tensor, out: Tensor) -> None:
    _of_table("iq4_nl", 2, lambda some: half(some, 0), blocks, out)


def _mxfp4(blocks: Tensor, out: Tensor) -> None:
    _of_table("mxfp4", 1, power_of_two, blocks, out)


# By GGUF's number of the type.
FORMATS = {
    0: GgufFormat("F32", 1, 4, torch.float32),
    1: GgufFormat("F16", 1, 2, torch.float16),
    30: GgufFormat("BF16", 1, 2, torch.bfloat16),
    8: GgufFormat("Q8_0", 32, 34, torch.float32, _q8_0),
    2: GgufFormat("Q4_0", 32, 18, torch.float32, _q4_0),
    3: GgufFormat("Q4_1", 32, 20, torch.float32, _q4_1),
    6: GgufFormat("Q5_0", 32, 22, torch.float32, _q5_0),
    7: GgufFormat("Q5_1", 32, 24, torch.float32, _q5_1),
    12: GgufFormat("Q4_K", 256, 144, torch.float32, _q4_k),
    13: GgufFormat("Q5_K", 256, 176, torch.float32, _q5_k),
    14: GgufFormat("Q6_K", 256, 210, torch.float32, _q6_k),
    20: GgufFormat("IQ4_NL", 32, 18, torch.float32, _iq4_nl),
    39: GgufFormat("MXFP4", 32, 17, torch.float32, _mxfp4),
}
