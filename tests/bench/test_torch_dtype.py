"""The dtype that torch is measured in: its fastest one, with and without bf16 in hardware."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from tilewright.bench import row, timing, torch_dtype
from tilewright.bench.rows import attention, linear
from tilewright.bench.rows import linear as moe
from tilewright.bench.serve import report as serve_report
from tilewright.bench.shapes import ExpertShape, VisionShape
from tilewright.engine.measure import machine


@pytest.fixture(autouse=True)
def forget():
    torch_dtype._timed.cache_clear()
    yield
    torch_dtype._timed.cache_clear()


class Clock:
    """Products that take as long as a machine of our choice would, without being computed."""

    def __init__(self, **gflops: float) -> None:
        self.gflops = gflops
        self.total_s = 0.0

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> float:
        flops = 2 * x.shape[0] * weight.numel()
        seconds = flops / (1e9 * self.gflops[torch_dtype.dtype_name(x.dtype)])
        self.total_s += seconds
        return seconds


@pytest.mark.parametrize(
    "gflops,expected",
    [
        ({"bfloat16": 0.3, "float32": 30.0}, torch.float32),  # a Neoverse-N1
        ({"bfloat16": 3000.0, "float32": 500.0}, torch.bfloat16),
        ({"bfloat16": 0.3, "float32": 0.2}, torch.bfloat16),
        ({"bfloat16": 50.0, "float32": 50.0}, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 2, 4096])
def test_the_faster_type_is_found_in_a_second_or_two(monkeypatch, gflops, expected, num_rows):
    clock = Clock(**gflops)
    monkeypatch.setattr(torch_dtype, "_product_s", clock)
    assert torch_dtype.fastest_dtype(num_rows) is expected
    assert clock.total_s < 1.5, "however slow a type is"
    spent_s = clock.total_s
    assert torch_dtype.fastest_dtype(num_rows) is expected and clock.total_s == spent_s, "timed once"


def test_vectors_and_matrices_are_timed_apart(monkeypatch):
    slow = {(1, torch.float32), (128, torch.bfloat16)}
    monkeypatch.setattr(torch_dtype, "_product_s", lambda x, _: 0.1 if (len(x), x.dtype) in slow else 0.001)
    assert torch_dtype.by_product() == {"matrix": "float32", "vector": "bfloat16"}


def test_for_real():
    assert set(torch_dtype.by_product().values()) <= {"bfloat16", "float32"}


def test_the_file_needs_nothing_of_ours():
    """An environment with another torch runs it by its path (benchmarks/peer_workers/transformers_worker.py)."""
    code = "import runpy, sys; sys.modules['tilewright'] = None; print(runpy.run_path(sys.argv[1])['MATRIX'])"
    done = subprocess.run([sys.executable, "-c", code, torch_dtype.__file__], capture_output=True, text=True)
    assert done.stdout.strip() == str(torch_dtype.MATRIX), done.stderr


@pytest.fixture
def no_fast_bf16(monkeypatch):
    """A machine whose torch has no fast bf16; returns the types that torch's side multiplies in from here on."""
    monkeypatch.setattr(torch_dtype, "_product_s", Clock(bfloat16=0.3, float32=30.0))
    monkeypatch.setattr(row, "ROTATION_BYTES", 1 << 16)
    seen = []
    for name in ("linear", "conv3d", "scaled_dot_product_attention"):
        call = getattr(functional, name)

        def noting(x, *arguments, call=call, **options):
            seen.append(x.dtype)
            return call(x, *arguments, **options)

        monkeypatch.setattr(functional, name, noting)
    return seen


def test_the_probe_uses_and_names_the_faster_dtype(monkeypatch, no_fast_bf16):
    monkeypatch.setattr(timing, "GEMM_SHAPE", (64, 64, 64))
    monkeypatch.setattr(machine, "measure", lambda seconds: machine.MeasuredMachine(20.0, 19.0, 11.0, 2.0, 4.0, 0.1))
    assert timing.probe().gemm_dtype == "float32"
    assert set(no_fast_bf16) == {torch.float32}


def test_rows_compare_with_the_faster_type(monkeypatch, no_fast_bf16):
    monkeypatch.setattr(attention, "CONTEXT", 256)
    monkeypatch.setattr(linear, "VISION_ROWS", (64,))
    made = [
        linear._calls(5, 64, 32, gated=False),
        linear._calls(1, 64, 32, gated=True),
        linear._patches(VisionShape(64, 64, 2, 32, 64)),
        moe._moe_calls(ExpertShape("small", 64, 32, 8, 2), 4),
        attention._varlen(64, 2, 64),
        attention._paged(2, 1, 4, 2, 64),
        attention._paged(1, 128, 4, 2, 64),
    ]
    for calls in made:
        no_fast_bf16.clear()
        calls.torch(0)
        assert set(no_fast_bf16) == {torch.float32}
        calls.ours(0)
        assert calls.check(), "ours is compared with its twin in its own type"


def test_the_mean_of_probes_names_every_type_that_was_chosen():
    one = {"read_gb_s": 10.0, "read_gb_s_median": 9.0, "gemm_tflops": 1.0, "peak_tflops": 2.0, "gemm_dtype": "float32"}
    assert serve_report.mean_probe([one, one]) == one
    other = one | {"gemm_tflops": 3.0, "gemm_dtype": "bfloat16"}
    assert serve_report.mean_probe([one, other]) == one | {"gemm_tflops": 2.0, "gemm_dtype": "float32 and bfloat16"}
