"""Kernels of gpu_kernels.cu, compiled on first use by the compiler of torch's CUDA (NVRTC).

If they cannot be compiled, torch's own kernels compute the same in more calls, with one warning.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("gpu_kernels.cu")
WARPS = 4  # of every block except those of norms
BLOCK_ROWS = 4  # rows of the weight per block
MAX_ROWS = 4  # of x in a product: larger ones use a library's
MAX_NORMS = 64  # rows: more are enough work for a library's kernel
MAX_WIDTH = 256  # of a head whose norm and rope are one call
MAX_GROUP = 8
LANES = (4, 8, 16, 32)  # lanes that may share a key
KEYS_PER_PART = 32  # at least, if the keys of a sequence are split over blocks
MAX_PARTS = 32
ACTIVATIONS = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu_erf": 3}


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with a flag as its value."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("flag", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


# PROGRAMMATIC_STREAM_SERIALIZATION: a kernel starts while the one before it runs, and waits for its inputs itself.
_STARTS_EARLY = _LaunchAttribute(6, 0, 1)


class _Kernel:
    """A function of a compiled module, in the context of one device."""

    def __init__(self, driver: Any, function: ctypes.c_void_p, device: torch.device) -> None:
        self._driver, self._function, self._device = driver, function, device
        self._num_attributes = 1 if torch.cuda.get_device_capability(device) >= (9, 0) else 0

    def __call__(self, grid: tuple[int, int], threads: int, *arguments: Tensor | int | float) -> None:
        values = [_as_c(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.pointer(v), ctypes.c_void_p) for v in values))
        config = _LaunchConfig(
            (*grid, 1),
            (threads, 1, 1),
            0,
            torch.cuda.current_stream(self._device).cuda_stream,
            ctypes.pointer(_STARTS_EARLY),
            self._num_attributes,
        )
        with torch.cuda.device(self._device):
            code = self._driver.cuLaunchKernelEx(ctypes.byref(config), self._function, addresses, None)
        if code:
            _check_driver(self._driver, code)


def _as_c(argument: Tensor | int | float) -> ctypes.c_void_p | ctypes.c_longlong | ctypes.c_float:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_longlong(argument)


def kernel(name: str, device: torch.device, **settings: int) -> _Kernel | None:
    """Return the kernel with its settings; None if it cannot be compiled."""
    return _compiled(name, device, tuple(settings.items())) if _is_usable(device) else None


@functools.cache
def _is_usable(device: torch.device) -> bool:
    """Return whether kernels can be compiled for the device, by trying the simplest one."""
    if device.type != "cuda":
        return False
    try:
        _compiled("store_rows", device, ())
    except Exception as error:
        _log.warning("kernels cannot be compiled for %s, decoding is slower: %s", device, str(error)[:300])
        return False
    return True


@functools.cache
def _compiled(name: str, device: torch.device, settings: tuple[tuple[str, int], ...]) -> _Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    options = [f"--gpu-architecture=sm_{major}{minor}", *(f"-D{key}={value}" for key, value in settings)]
    image = _compile(SOURCE.read_text(), options)
    driver = ctypes.CDLL("libcuda.so.1")
    with torch.cuda.device(device):
        torch.empty(1, device=device)  # makes the device's context the current one
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _check_driver(driver, driver.cuModuleLoadData(ctypes.byref(module), image))
        _check_driver(driver, driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    return _Kernel(driver, function, device)


def _compile(source: str, options: list[str]) -> bytes:
    """Return the machine code of a source."""
    compiler = _nvrtc()
    program = ctypes.c_void_p()
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    created = compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"gpu_kernels.cu", 0, None, None)
    if created:
        raise RuntimeError(f"NVRTC's error {created}")
    size = ctypes.c_size_t()
    try:
        if compiler.nvrtcCompileProgram(program, len(options), given):
            compiler.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            compiler.nvrtcGetProgramLog(program, log)
            raise RuntimeError(log.value.decode())
        compiler.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        compiler.nvrtcGetCUBIN(program, image)
        return image.raw
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc() -> Any:
    """Return the library, which torch has loaded or can find."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libnvrtc.so.{major}")
    except OSError:
        return ctypes.CDLL("libnvrtc.so")


def _check_driver(driver: Any, code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA's error {code}: {text.value.decode() if text.value else 'unknown'}")


def _is_aligned(*tensors: Tensor) -> bool:
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def few_rows(
    x: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None,
    gated: bool,
    activation: str,
    residual: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor | None:
    """Return activation(x W^T + b) + residual of at most MAX_ROWS rows, rounded once; None if not applicable.

    Nothing on the stream may write the weight: it is read before earlier work is done.
    """
    n, k = weight_NK.shape
    columns = n // 2 if gated else n
    flat = x.view(-1, k) if x.is_contiguous() else None
    if flat is None or not 0 < len(flat) <= MAX_ROWS or k % 8 or activation not in ACTIVATIONS:
        return None
    if not weight_NK.is_contiguous() or not _is_aligned(flat, weight_NK) or weight_NK.dtype != torch.bfloat16:
        return None
    out_dtype = out_dtype if out is None else out.dtype
    if out_dtype not in (torch.bfloat16, torch.float32) or not (out is None or out.is_contiguous()):
        return None
    if residual is not None and (residual.dtype != torch.bfloat16 or not residual.is_contiguous()):
        return None
    compute = kernel("few_rows", x.device, ROWS=len(flat))
    if compute is None:
        return None
    if out is None:
        out = torch.empty(*x.shape[:-1], columns, dtype=out_dtype, device=x.device)
    compute(
        (-(-columns // (BLOCK_ROWS // 2 if gated else BLOCK_ROWS)), 1),
        32 * WARPS,
        flat,
        weight_NK,
        flat if bias is None else bias,
        flat if residual is None else residual,
        out,
        n,
        k,
        k,
        columns,
        columns,
        int(bias is not None),
        int(residual is not None),
        int(gated),
        ACTIVATIONS[activation],
        int(out_dtype == torch.float32),
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool, out: Tensor | None) -> Tensor | None:
    """Return the norm of rows, times the weight; None if not applicable."""
    width = x.shape[-1]
    flat = x.view(-1, width) if x.is_contiguous() else None
    if flat is None or not 0 < len(flat) <= MAX_NORMS or width % 8 or not _is_aligned(x, weight):
        return None
    if any(part.dtype != torch.bfloat16 for part in (x, weight)) or not weight.is_contiguous():
        return None
    if out is not None and (out.dtype != torch.bfloat16 or not out.is_contiguous()):
        return None
    compute = kernel("rms_norm", x.device)
    if compute is None:
        return None
    out = torch.empty_like(x) if out is None else out
    threads = min(32 * -(-width // 256), 1024)  # one load per thread
    compute((len(flat), 1), threads, flat, weight, out, width, width, width, int(plus_one), float(eps))
    return out


def norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    plus_one: bool,
) -> bool:
    """Apply the norm of heads, if there are weights, and rope, in place; return False if not applicable."""
    num_tokens, _, width = q.shape
    halves = [x for x in (q, k, q_weight, k_weight) if x is not None]
    if any(x.dtype != torch.bfloat16 or x.stride(-1) != 1 for x in halves) or width > MAX_WIDTH:
        return False
    tables = cos, sin
    if any(x.dtype != torch.float32 or not x.is_contiguous() or x.dim() != 2 for x in tables) or not num_tokens:
        return False
    compute = kernel("norm_rope", q.device)
    if compute is None:
        return False
    norm = 0 if q_weight is None else 2 if plus_one else 1
    num_heads = num_tokens * (q.shape[1] + k.shape[1])
    compute(
        (-(-num_heads // WARPS), 1),
        32 * WARPS,
        q,
        k,
        q if q_weight is None else q_weight,
        k if k_weight is None else k_weight,
        *tables,
        num_tokens,
        q.shape[1],
        k.shape[1],
        width,
        cos.shape[1],
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        norm,
        float(eps),
    )
    return True


def store_rows(k: Tensor, v: Tensor, pages: Tensor, slots: Tensor) -> bool:
    """Store keys and values [T, G, K] in slots of pages [2, pages, page_size, G, K]; return False if not applicable."""
    num_tokens, num_heads, head_width = k.shape
    width = num_heads * head_width
    for x in (k, v):
        if x.dtype != torch.bfloat16 or x.stride(1) != head_width or x.stride(2) != 1 or x.stride(0) % 8:
            return False
    if width % 8 or pages.dtype != torch.bfloat16 or not _is_aligned(k, v, pages[0], pages[1]) or not num_tokens:
        return False
    compute = kernel("store_rows", k.device)
    if compute is None or slots.dtype != torch.int64 or slots.stride(0) != 1:
        return False
    num_rows = pages.shape[1] * pages.shape[2]
    compute((num_tokens, 1), 32 * WARPS, k, v, pages[0], pages[1], slots, num_rows, width, k.stride(0), v.stride(0))
    return True


def decode_attention(
    q: Tensor, pages: Tensor, block_table: Tensor, kv_lengths: Tensor, scale: float, window: int, out: Tensor | None
) -> Tensor | None:
    """Return attention of one query per sequence, q [B, H, K], over its pages; None if not applicable."""
    num_sequences, num_heads, width = q.shape
    kv_heads, page_size = pages.shape[3], pages.shape[2]
    lanes, group = width // 8, num_heads // kv_heads
    if width % 8 or lanes not in LANES or not 1 <= group <= MAX_GROUP or q.dtype != torch.bfloat16:
        return None
    if q.stride(2) != 1 or q.stride(0) % 8 or q.stride(1) % 8 or pages.dtype != torch.bfloat16:
        return None
    if not _is_aligned(q, pages[0], pages[1]) or block_table.stride(1) != 1 or not (out is None or out.is_contiguous()):
        return None
    attend = kernel("decode_attention", q.device, LANES=lanes, GROUP=group)
    join = kernel("join_parts", q.device)
    if attend is None or join is None:
        return None
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_parts = num_parts_of(num_sequences * kv_heads, block_table.shape[1] * page_size, _num_processors(q.device))
    partial = torch.empty(num_sequences * num_heads, num_parts, width + 2, device=q.device)
    sizes = kv_heads, page_size, block_table.stride(0), q.stride(0), q.stride(1), window
    attend(
        (num_sequences * kv_heads, num_parts),
        32 * WARPS,
        q,
        pages[0],
        pages[1],
        block_table,
        kv_lengths,
        out,
        partial,
        *sizes,
        float(scale),
    )
    if num_parts > 1:
        join((num_sequences * num_heads, 1), 32 * WARPS, partial, out, num_parts, width)
    return out


def num_parts_of(num_blocks: int, max_keys: int, num_processors: int) -> int:
    """Return the number of blocks that share a sequence's keys: enough for all processors, with enough keys each."""
    return max(1, min(-(-2 * num_processors // num_blocks), max_keys // KEYS_PER_PART, MAX_PARTS))


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
