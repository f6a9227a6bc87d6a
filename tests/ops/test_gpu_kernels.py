"""The kernels of a GPU, emulated on the CPU, beside the ops in plain torch."""

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tilewright.ops.torch_backend import attention, embedding, gpu_kernels, linear, norm

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="emulation needs a C++ compiler")
EMULATION = Path(__file__).with_name("gpu_emulation.cc")


@pytest.fixture(autouse=True)
def emulated(monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    monkeypatch.setattr(gpu_kernels, "kernel", lambda name, device, **settings: compiled(folder, name, settings))
    monkeypatch.setattr(gpu_kernels, "_num_processors", lambda device: 3)


def compiled(folder, name, settings):
    library = _library(folder, tuple(settings.items()))

    def launch(grid, threads, *arguments):
        values = [gpu_kernels._as_c(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.pointer(v), ctypes.c_void_p) for v in values))
        getattr(library, f"run_{name}")(*grid, threads, addresses)

    return launch


@functools.cache
def _library(folder, settings):
    target = folder / ("_".join(["emulated", *(f"{key}{value}" for key, value in settings)]) + ".so")
    defines = [f"-D{key}={value}" for key, value in settings]
    command = [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", "-fpermissive", "-w", *defines]
    subprocess.run(
        [*command, f"-I{gpu_kernels.SOURCE.parent}", str(EMULATION), "-o", str(target)], check=True, timeout=120
    )
    return ctypes.CDLL(str(target))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_near(ours, theirs):
    """Within two roundings of bf16."""
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize(("num_rows", "k"), [(1, 296), (2, 296), (4, 296), (1, 8), (1, 1024), (3, 2600)])
@pytest.mark.parametrize(
    ("n", "gated", "activation", "bias", "residual", "out_dtype"),
    [
        (37, False, "none", False, False, torch.float32),
        (40, False, "none", True, True, torch.bfloat16),
        (40, True, "silu", False, False, torch.bfloat16),
        (24, True, "gelu_tanh", True, False, torch.bfloat16),
        (7, False, "gelu_erf", True, False, torch.bfloat16),
    ],
)
def test_products_of_few_rows(num_rows, k, n, gated, activation, bias, residual, out_dtype):
    x, weight = normal(num_rows, k, seed=1), normal(n, k, seed=2) * k**-0.5
    own_bias = normal(n, seed=3).float() if bias else None
    own_residual = normal(num_rows, n // 2 if gated else n, seed=4) if residual else None
    theirs = linear.plain_linear(
        x, weight, own_bias, gated=gated, activation=activation, residual=own_residual, out_dtype=out_dtype
    )
    out = own_residual.clone() if residual else None
    ours = gpu_kernels.few_rows(x, weight, own_bias, gated, activation, out, out, out_dtype)
    assert ours.dtype == out_dtype and (out is None or ours is out)
    assert_near(ours, theirs)


def test_products_that_are_for_others():
    weight = normal(8, 32)
    assert gpu_kernels.few_rows(normal(5, 32), weight, None, False, "none", None, None, torch.bfloat16) is None
    assert gpu_kernels.few_rows(normal(1, 36), normal(8, 36), None, False, "none", None, None, torch.bfloat16) is None
    assert gpu_kernels.few_rows(normal(1, 32), weight, None, False, "gelu_quick", None, None, torch.bfloat16) is None


@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (3, 296), (2, 4096)])
@pytest.mark.parametrize("plus_one", [False, True])
def test_norm_of_rows(num_rows, width, plus_one):
    x, weight = normal(num_rows, width, seed=1) * 3, normal(width, seed=2)
    out = torch.full_like(x, float("nan"))
    theirs = norm.rms_norm(x, weight, 1e-6, weight_plus_one=plus_one)
    assert gpu_kernels.rms_norm(x, weight, 1e-6, plus_one, out) is out
    assert_near(out, theirs)
    assert gpu_kernels.rms_norm(normal(gpu_kernels.MAX_NORMS + 1, width), weight, 1e-6, plus_one, None) is None


@pytest.mark.parametrize(("width", "rotated"), [(128, 128), (72, 72), (64, 16), (256, 64)])
@pytest.mark.parametrize("norm", [None, False, True])
def test_norm_and_rope(width, rotated, norm):
    qkv = normal(3, 12, width)
    q, k = qkv[:, 0:8:2], qkv[:, 8:10]
    angle = torch.randn(3, rotated // 2, generator=torch.Generator().manual_seed(5))
    cos, sin = angle.cos(), angle.sin()
    weights = None if norm is None else (normal(width, seed=6), normal(width, seed=7))
    theirs = qkv.clone()
    their_q, their_k = theirs[:, 0:8:2], theirs[:, 8:10]
    if weights is None:
        embedding.rope_qk(their_q, their_k, cos, sin)
        assert gpu_kernels.norm_rope(q, k, None, None, 0.0, cos, sin, False)
    else:
        embedding.qk_norm_rope(their_q, their_k, *weights, 1e-6, cos, sin, weight_plus_one=norm)
        assert gpu_kernels.norm_rope(q, k, *weights, 1e-6, cos, sin, norm)
    assert_near(qkv, theirs)


def test_keys_and_values_go_to_their_slots():
    pages = normal(2, 4, 32, 2, 16)  # the last page is nobody's
    before = pages.clone()
    qkv = normal(3, 8, 16, seed=8)
    k, v = qkv[:, 4:6], qkv[:, 6:]
    assert gpu_kernels.store_rows(k, v, pages, torch.tensor([70, -1, 5]))
    for kind, x in enumerate((k, v)):
        rows = before[kind].flatten(0, 1)
        rows[torch.tensor([70, -1, 5])] = x
        assert pages[kind].flatten(0, 1).equal(rows)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 32), (4, 1, 128), (3, 1, 64), (2, 2, 256)])
@pytest.mark.parametrize("window", [0, 50])
def test_attention_of_one_query_each(heads, kv_heads, width, window):
    """In one part and in several; a sequence without keys gives zeros, and pages that are not its own are not read."""
    from tilewright.ops.attention import KvCache

    lengths = [1, 200, 0, 97]
    data = torch.full((2, 17, 32, kv_heads, width), float("nan")).bfloat16()
    table = torch.full((4, 8), -1, dtype=torch.int32)
    free = iter(torch.randperm(16, generator=torch.Generator().manual_seed(1)).tolist())
    for sequence, length in enumerate(lengths):
        for page in range(-(-length // 32)):
            table[sequence, page] = next(free)
            count = min(32, length - 32 * page)
            data[:, table[sequence, page], :count] = normal(2, count, kv_heads, width, seed=sequence + 9 * page)
    q = normal(4, heads + 1, width, seed=3)[:, :heads]
    cache = KvCache(data, 32, width, torch.bfloat16)
    kv_lengths, starts = torch.tensor(lengths, dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    theirs = attention.paged_attention(q, cache, table, starts, kv_lengths, window=window)
    ours = gpu_kernels.decode_attention(q, data, table, kv_lengths, width**-0.5, window, None)
    assert ours[2].abs().max() == 0
    assert_near(ours, theirs)


def test_parts_of_attention():
    assert gpu_kernels.num_parts_of(8, 32, 132) == 1  # too few keys to share
    assert gpu_kernels.num_parts_of(8, 512, 132) == 16
    assert gpu_kernels.num_parts_of(8, 1 << 20, 132) == 32
    assert gpu_kernels.num_parts_of(512, 1 << 20, 132) == 1
