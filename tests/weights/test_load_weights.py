"""Models filled from checkpoints: the right values, strictly, within the memory promised."""

import os
import re
import subprocess
import sys

import pytest
import torch

import tilewright.ops.linear as linear_ops
from tilewright.ops.linear import pack_weight
from tilewright.weights.checkpoint import CheckpointError
from tilewright.weights.conv import Unpacked
from tilewright.weights.linear import LinearWeight, PatchWeight
from tilewright.weights.load import _is_finite, load

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def tensors_of(parts, columns: int, dtype: torch.dtype, bias: bool) -> dict[str, torch.Tensor]:
    tensors = {f"{name}.weight": random(rows, columns, dtype=dtype) for name, rows in parts}
    return tensors | ({f"{name}.bias": random(rows, dtype=dtype) for name, rows in parts} if bias else {})


def same_packed(got, expected) -> bool:
    same_bias = got.bias is expected.bias is None or torch.equal(got.bias, expected.bias)
    sizes = (got.n, got.k, got.gated) == (expected.n, expected.k, expected.gated)
    return sizes and same_bias and got.dtype == expected.dtype and torch.equal(got.data, expected.data)


@pytest.mark.parametrize("block_bytes", [1, 40_000, 8 << 20])  # one strip, a few, all at a time
@pytest.mark.parametrize("source_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rows,columns,gated",
    [
        ([64], 32, False),
        ([7], 5, False),
        ([333], 129, False),
        ([96, 32, 32], 64, False),
        ([50, 17, 90, 3], 70, False),
        ([48, 48], 64, True),
        ([37, 37], 33, True),
        ([270, 270], 65, True),
        ([74], 40, True),
    ],
)
def test_linears(make_checkpoint, monkeypatch, block_bytes, source_dtype, dtype, rows, columns, gated):
    monkeypatch.setattr(linear_ops, "PACK_BLOCK_BYTES", block_bytes)
    parts = [(f"part{i}", count) for i, count in enumerate(rows)]
    tensors = tensors_of(parts, columns, source_dtype, bias=True)
    weight = LinearWeight(parts, columns, bias=True, gated=gated)
    load([weight], make_checkpoint(tensors), dtype=dtype)
    stacked = torch.cat([tensors[f"{name}.weight"].float() for name, _ in parts])
    bias = torch.cat([tensors[f"{name}.bias"].float() for name, _ in parts])
    expected = pack_weight(stacked, bias, gated=gated, dtype=dtype)
    assert same_packed(weight.value, expected)
    assert torch.equal(weight.value.unpack(), stacked.to(dtype))
    in_memory = LinearWeight(parts, columns, bias=True, gated=gated)
    in_memory.build([t.float() for t in tensors.values()], dtype)
    assert same_packed(in_memory.value, expected)


@pytest.mark.parametrize("source_dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_scaled_by_the_tanh_of_a_gate(make_checkpoint, source_dtype, bias):
    """In fp32, rounded once: the gate costs nothing later, and no accuracy now."""
    parts = [("part0", 37), ("part1", 20)]
    tensors = tensors_of(parts, 40, source_dtype, bias) | {"gate": torch.tensor([0.3], dtype=source_dtype)}
    weight = LinearWeight(parts, 40, bias=bias, tanh_scale="gate")
    load([weight], make_checkpoint(tensors), dtype=torch.bfloat16)
    scale = tensors["gate"].float().tanh()
    stacked = torch.cat([tensors[f"{name}.weight"].float() for name, _ in parts]) * scale
    biases = torch.cat([tensors[f"{name}.bias"].float() for name, _ in parts]) * scale if bias else None
    assert same_packed(weight.value, pack_weight(stacked, biases, dtype=torch.bfloat16))


@pytest.mark.parametrize("source_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (13,), (3000, 1200), (4, 3, 2)])
def test_plain_tensors_are_copies(make_checkpoint, source_dtype, dtype, shape):
    tensor = random(*shape, dtype=source_dtype)
    checkpoint = make_checkpoint({"table": tensor})
    weight = Unpacked("table", *shape)
    load([weight], checkpoint, dtype=dtype)
    assert weight.value.dtype == dtype and torch.equal(weight.value, tensor.float().to(dtype))
    # Memory of its own, not the file's: changing one leaves the other.
    checkpoint.read("table").zero_()
    assert torch.equal(weight.value, tensor.float().to(dtype))


@pytest.mark.parametrize("source_dtype", DTYPES)
def test_patch_embedding(make_checkpoint, source_dtype):
    kernel, bias = random(40, 3, 2, 4, 4, dtype=source_dtype), random(40, dtype=source_dtype)
    weight = PatchWeight("proj", (40, 3, 2, 4, 4))
    load([weight], make_checkpoint({"proj.weight": kernel, "proj.bias": bias}), dtype=torch.float32)
    assert torch.equal(weight.value.video.unpack(), kernel.float().flatten(1))
    torch.testing.assert_close(weight.value.still.unpack(), kernel.float().sum(2).flatten(1), rtol=1e-2, atol=1e-2)


def test_a_shared_weight_is_loaded_once(make_checkpoint):
    head = LinearWeight([("embed", 40)], 16)
    report = load([head, [head]], make_checkpoint({"embed.weight": random(40, 16)}), dtype=torch.float32)
    assert (report.num_tensors, report.source_bytes, report.ignored) == (1, 40 * 16 * 4, ())


def test_names_go_through_the_rule(make_checkpoint):
    checkpoint = make_checkpoint({"model.norm.weight": random(4), "rotary.inv_freq": random(3)})
    norm = Unpacked("norm.weight", 4)

    def rename(name: str) -> str | None:
        return None if name.endswith("inv_freq") else name.removeprefix("model.")

    report = load([norm], checkpoint, dtype=torch.float32, rename=rename)
    assert torch.equal(norm.value, random(4)) and report.ignored == ("rotary.inv_freq",)
    with pytest.raises(CheckpointError, match=r"has x twice, as model\.norm\.weight and as rotary\.inv_freq"):
        load([norm], checkpoint, dtype=torch.float32, rename=lambda name: "x")


def test_one_error_lists_all_that_differs(make_checkpoint):
    tensors = {"shape.weight": random(8, 4), "extra": random(2), "ids": torch.arange(3), "fine": random(5)}
    model = [LinearWeight([("shape", 9)], 4), Unpacked("ids", 3), Unpacked("gone", 7, 7), Unpacked("fine", 5)]
    with pytest.raises(CheckpointError) as error:
        load(model, make_checkpoint(tensors), dtype=torch.float32)
    message = str(error.value)
    for line in [
        "1 tensors missing:\n  gone [7, 7]",
        "1 tensors of no use to the model:\n  extra [2]",
        "1 tensors of another shape:\n  shape.weight [8, 4], expected [9, 4]",
        "1 tensors of a type other than float32, float16 and bfloat16:\n  ids int64",
    ]:
        assert line in message
    assert "fine" not in message
    with pytest.raises(AssertionError, match="fine is not loaded"):
        _ = model[3].value


def test_long_lists_are_cut(make_checkpoint):
    model = [Unpacked(f"t{i}", 1) for i in range(300)]
    with pytest.raises(CheckpointError, match=re.escape("300 tensors missing")) as error:
        load(model, make_checkpoint({"unused": random(2)}), dtype=torch.float32)
    assert "and 280 more" in str(error.value) and str(error.value).count("\n") < 30


def test_only_kernel_dtypes(make_checkpoint):
    with pytest.raises(ValueError, match=r"dtype is torch\.float16, expected one of torch\.bfloat16, torch\.float32"):
        load([], make_checkpoint({}), dtype=torch.float16)


def test_progress_is_quiet_without_a_terminal(make_checkpoint, capfd):
    load([Unpacked("t", 3)], make_checkpoint({"t": random(3)}), dtype=torch.float32, progress=True)
    assert capfd.readouterr() == ("", "")


MEASURE = """
import sys
from pathlib import Path
import torch
from tilewright.weights.checkpoint import open_checkpoint
from tilewright.weights.load import _is_finite, load
from tilewright.weights.linear import LinearWeight
from tilewright.weights.conv import Unpacked

def status_bytes(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024

warm = LinearWeight([("warm", 64)], 64)
warm.build([torch.zeros(64, 64)], torch.bfloat16)  # threads and libraries are there before counting starts
checkpoint = open_checkpoint(sys.argv[1])
model = [LinearWeight([("embed", 40000)], 1024)]
for i in range(16):
    model.append(LinearWeight([(f"{i}.q", 1024), (f"{i}.k", 512), (f"{i}.v", 512)], 1024))
    model.append(LinearWeight([(f"{i}.gate", 2048), (f"{i}.up", 2048)], 1024, gated=True))
    model.append(Unpacked(f"{i}.table", 2048, 1024))
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
before = status_bytes("VmRSS")
load(model, checkpoint, dtype=getattr(torch, sys.argv[2]))
weight_bytes = sum(
    v.numel() * v.element_size() for v in (w.value if isinstance(w, Unpacked) else w.value.data for w in model))
print(weight_bytes, status_bytes("VmHWM") - before)
"""


@pytest.mark.slow
def test_peak_memory_is_the_weights_and_a_tenth(make_checkpoint, source_dtype=torch.float16, dtype="bfloat16"):
    """Of weights that are converted, which takes more than those that are not."""
    tensors = {"embed.weight": torch.zeros(40000, 1024, dtype=source_dtype)}
    for i in range(16):
        rows = {
            "q.weight": 1024,
            "k.weight": 512,
            "v.weight": 512,
            "gate.weight": 2048,
            "up.weight": 2048,
            "table": 2048,
        }
        for name, count in rows.items():
            tensors[f"{i}.{name}"] = torch.ones(count, 1024, dtype=source_dtype)
    checkpoint = make_checkpoint(tensors)
    del tensors
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(checkpoint.files), dtype],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode == 0, result.stderr
    weight_bytes, peak_bytes = map(int, result.stdout.split())
    assert 300e6 < weight_bytes < 400e6
    assert peak_bytes <= weight_bytes * 1.1, f"{peak_bytes / weight_bytes:.3f} of the weights"
    print(f"peak {peak_bytes / weight_bytes:.3f} of the weights")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [0, 12_345, 64 * 4096 - 1])
def test_nan_is_refused_by_the_name_of_its_tensor(make_checkpoint, monkeypatch, dtype, at):
    monkeypatch.setattr(linear_ops, "PACK_BLOCK_BYTES", 100_000)  # some rows at a time
    tensors = {f"{name}.weight": random(64, 4096, dtype=dtype) for name in ("good", "bad")}
    tensors["bad.weight"].view(-1)[at] = torch.nan
    model = [LinearWeight([(name, 64)], 4096) for name in ("good", "bad")]
    with pytest.raises(
        CheckpointError, match=r"the tensor bad\.weight has 1 NaN among \d+ values: its file is damaged"
    ):
        load(model, make_checkpoint(tensors), dtype=torch.bfloat16)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_infinity_is_a_warning(make_checkpoint, caplog, value):
    weight = Unpacked("mask", 4, 4096)
    mask = torch.zeros(4, 4096)
    mask[1:, 2:] = value
    load([weight], make_checkpoint({"mask": mask}), dtype=torch.float32)
    assert torch.equal(weight.value, mask)
    assert [record.message.endswith("the tensor mask has infinite values") for record in caplog.records] == [True]


def test_finite_is_told_of_every_bf16_value():
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
    told = torch.tensor([_is_finite(value) for value in values])
    assert torch.equal(told, values.isfinite()) and not told.all()
    wide = values.float()[::16]
    assert torch.equal(torch.tensor([_is_finite(value) for value in wide]), wide.isfinite())
