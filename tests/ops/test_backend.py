"""The two backends: one signature for each op, chosen for each thread, and nothing of torch's waits for a device."""

import ast
import inspect
import threading
from importlib import import_module
from pathlib import Path

import pytest
import torch
from helpers import poisoned, rand

import tilewright.ops
from tilewright.ops import (
    activation,
    attention,
    backend,
    conv,
    embedding,
    gated_delta,
    linear,
    media,
    moe,
    norm,
    plan,
    sample,
)
from tilewright.ops import conv as conv3d
from tilewright.ops import embedding as rope
from tilewright.ops import norm as ada_norm
from tilewright.ops import norm as group_norm
from tilewright.ops.attention import KvCache, kv_store
from tilewright.ops.packed import weight_format

FOLDER = Path(tilewright.ops.__file__).parent
META = torch.device("meta")


def torch_module(family):
    return import_module(f"tilewright.ops.torch_backend.{family}")


@pytest.mark.parametrize("family,name", sorted(backend.OPS), ids=".".join)
def test_an_op_has_one_signature(family, name):
    native, plain = backend.OPS[family, name], getattr(torch_module(family), name)
    # Their annotations too, as they are written: some files have them as strings.
    assert str(inspect.signature(plain, eval_str=True)) == str(inspect.signature(native, eval_str=True))


def calls_kernels(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "kernels"
        for node in ast.walk(function)
    )


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_every_function_that_calls_a_kernel_is_an_op(path):
    """But those that set threads up, and private ones, which an op calls."""
    if path.stem in ("native", "plan"):
        return
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and calls_kernels(node) and not node.name.startswith("_"):
            assert (path.stem, node.name) in backend.OPS, f"{path.name}: {node.name} has no @op"
        if isinstance(node, ast.ClassDef):
            assert not calls_kernels(node), f"{path.name}: {node.name} calls a kernel, expected an op to"


@pytest.mark.parametrize("path", sorted((FOLDER / "torch_backend").glob("*.py")), ids=lambda path: path.stem)
def test_no_value_of_a_tensor_comes_to_python(path):
    """Each of these would make a GPU's stream wait; `test_all_on_another_device` finds the ones without a name."""
    names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not names & {"tolist", "item", "numpy", "cpu", "nonzero"}


def test_it_is_chosen_for_each_thread():
    x, weight = rand(2, 8), torch.ones(8)
    seen = {}

    def other_thread():
        seen["at first"] = backend.active()
        backend.activate("torch")
        seen["then"] = backend.active()

    with backend.use("torch"):
        assert backend.active() == "torch"
        with backend.use("native"):
            assert backend.active() == "native"
        assert backend.active() == "torch"
        with pytest.raises(ZeroDivisionError), backend.use("native"):
            _ = 1 / 0
        assert backend.active() == "torch"
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        # An op of which only the torch backend can tell: kernels refuse fp64.
        assert norm.rms_norm(x.double(), weight, 1e-6).dtype == torch.float64
    assert seen == {"at first": "native", "then": "torch"}
    with pytest.raises(ValueError, match="x is float64"):
        norm.rms_norm(x.double(), weight, 1e-6)


def test_names_that_are_none():
    with pytest.raises(ValueError, match="backend is 'cuda', expected native or torch"):
        backend.activate("cuda")
    with pytest.raises(ValueError, match="device is meta, expected cpu: the native backend runs there only"):
        backend.activate("native", "meta")
    assert backend.active() == "native"


def test_one_backend_does_not_read_what_another_laid_out():
    weight, x = rand(40, 48), rand(3, 48)
    q, slots = rand(1, 2, 16), torch.tensor([0])
    packed, cache = linear.pack_weight(weight), KvCache.empty(2, 32, 2, 16, torch.float32)
    with backend.use("torch"):
        rows, pages = linear.pack_weight(weight), KvCache.empty(2, 32, 2, 16, torch.float32)
        assert weight_format(torch.float32).layout == "rows" and torch.equal(rows.unpack(), weight)
        with pytest.raises(ValueError, match="expected 'rows': it was packed for the native backend"):
            linear.linear(x, packed)
        with pytest.raises(ValueError, match="pages of the native backend"):
            kv_store(q, q, cache, slots)
    with pytest.raises(ValueError, match="layout"):
        linear.linear(x, rows)
    with pytest.raises(ValueError, match="cache"):
        kv_store(q, q, pages, slots)


def test_a_plan_is_of_native_kernels():
    recording = plan.Plan(plan.Arena()).record()
    with backend.use("torch"), pytest.raises(RuntimeError, match="the torch backend is active"), recording:
        pass


def test_results_of_torch_are_not_of_the_arena():
    arena = plan.Arena()
    with backend.use("torch"), arena.use():
        plan.empty((3, 5), torch.float32)
    assert arena.size_bytes == 0
    with backend.use("torch", META), arena.use():
        assert plan.empty((3, 5), torch.float32).device == META


def calls_of_every_op(dtype):
    """Each op as a model calls it: (op, arguments, keywords), on the meta device."""
    f32 = torch.float32

    def at(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device=META)

    def ids(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device=META)

    cache = KvCache.empty(4, 32, 2, 16, dtype)
    packed = linear.pack_weight(at(40, 48), at(40))
    gated = linear.pack_weight(at(80, 48), gated=True)
    conv_2d, conv_3d = (conv3d.pack_conv(at(8, *axes)) for axes in ((6, 3, 3), (40, 3, 3, 3)))
    experts = [moe.PackedExperts.empty(8, n, k, g, dtype) for n, k, g in ((64, 48, True), (48, 32, False))]
    delta = (
        at(6, 2, 16),
        at(6, 2, 16),
        at(6, 4, 8),
        at(6, 4, dtype=f32),
        at(6, 4, dtype=f32),
        at(5, 4, 16, 8, dtype=f32),
    )
    filters = at(3, dtype=f32), ids(3, dtype=torch.int64), at(3, dtype=f32), at(3, dtype=f32)
    return [
        (norm.rms_norm, (at(3, 48), at(48), 1e-6), {"residual": at(3, 48), "gate": at(3, 48), "out": at(3, 48)}),
        (norm.layer_norm, (at(3, 48), at(48), at(48), 1e-6), {"out": at(3, 48)}),
        (
            group_norm.group_norm,
            (at(2, 3, 4, 48), 6, at(48), None, 1e-6),
            {"activation": "silu", "out": at(2, 3, 4, 48)},
        ),
        (group_norm.group_statistics, (at(2, 3, 4, 48), 6), {}),
        (
            ada_norm.ada_layer_norm,
            (at(2, 6, 48), at(2, 48), at(2, 6, 48), 1e-6),
            {"residual": at(2, 6, 48), "gate": at(2, 3, 1, 48), "out": at(2, 6, 48)},
        ),
        (ada_norm.ada_rms_norm, (at(2, 6, 48), at(2, 48), None, 1e-6), {"weight": at(48)}),
        (ada_norm.gated_add, (at(2, 6, 48), at(2, 6, 48), at(2, 48, dtype=f32)), {"out": at(2, 6, 48)}),
        (linear.linear, (at(3, 48), packed), {"residual": at(3, 40), "out": at(3, 40)}),
        (linear.linear, (at(3, 48), gated), {"activation": "silu", "out_dtype": f32}),
        (moe.route, (at(3, 8, dtype=f32), 3), {"renormalize": True}),
        (moe.moe, (at(2, 48), ids(2, 3), at(2, 3, dtype=f32), *experts), {"residual": at(2, 48)}),
        (moe.moe, (at(9, 48), ids(9, 3), at(9, 3, dtype=f32), *experts), {"out": at(9, 48)}),
        (embedding.embedding, (ids(3), packed), {"out": at(3, 48)}),
        (embedding.embedding, (ids(3, dtype=torch.int64), at(9, 48)), {}),
        (embedding.scatter_rows, (at(9, 48), ids(2, dtype=torch.int64), at(2, 48)), {}),
        (embedding.scatter_add_rows, (at(9, 48), ids(2, dtype=torch.int64), at(2, 48)), {}),
        (kv_store, (at(3, 2, 16), at(3, 2, 16), cache, ids(3, dtype=torch.int64)), {}),
        (attention.paged_attention, (at(2, 4, 16), cache, ids(2, 2), ids(3), ids(2)), {"window": 9}),
        (attention.paged_attention, (at(9, 4, 16), cache, ids(2, 2), ids(3), ids(2)), {"out": at(9, 4, 16)}),
        (
            attention.varlen_attention,
            (at(9, 4, 16), at(7, 2, 16), at(7, 2, 16), ids(3), ids(3)),
            {"mask": at(1, 1, 1, 7), "soft_cap": 2.0, "causal": True},
        ),
        (rope.rope_table, (ids(3, 5, dtype=torch.int64), at(8, dtype=f32), ids(8)), {}),
        (rope.rope, (at(5, 2, 32), at(5, 8, dtype=f32), at(5, 8, dtype=f32)), {"out": at(5, 2, 32)}),
        (rope.rope_qk, (at(5, 2, 32), at(5, 1, 32), at(5, 16, dtype=f32), at(5, 16, dtype=f32)), {}),
        (
            rope.qk_norm_rope,
            (at(5, 2, 32), at(5, 1, 32), at(32), at(32), 1e-6, at(5, 16, dtype=f32), at(5, 16, dtype=f32)),
            {},
        ),
        (activation.activate, (at(3, 8), "silu"), {"out": at(3, 8)}),
        (activation.activate_and_mul, (at(3, 8), "gelu_tanh"), {}),
        (activation.add, (at(3, 8), at(3, 8)), {"out": at(3, 8)}),
        (activation.sigmoid_gate, (at(3, 8), at(3, 1, dtype=f32)), {}),
        (activation.snake, (at(3, 8), at(8, dtype=f32), at(8, dtype=f32)), {}),
        (gated_delta.split_projections, (at(6, 128), at(6, 8), 2, 4, 16, 8), {"interleaved": True}),
        (gated_delta.delta_gates, (at(6, 4), at(6, 4), at(4), at(4)), {}),
        (gated_delta.gated_delta_rule, (*delta, ids(3), ids(2)), {"out": at(6, 4, 8)}),
        (gated_delta.gated_delta_rule, (*delta, ids(3), ids(2), ids(6)), {}),
        (conv.causal_conv, (at(6, 8), at(4, 8), at(5, 3, 8), ids(3), ids(2)), {"bias": at(8)}),
        (conv.causal_conv, (at(6, 8), at(4, 8), at(5, 3, 8), ids(3), ids(2), ids(6)), {"out": at(6, 8)}),
        (conv3d.conv3d, (at(2, 3, 5, 4, 40), conv_3d), {"previous": at(2, 1, 5, 4, 40), "out": at(2, 3, 3, 2, 8)}),
        (conv3d.conv2d, (at(2, 5, 4, 6), conv_2d), {"upsample": True, "activation": "silu", "out": at(2, 8, 6, 8)}),
        (sample.sample, (at(3, 50, dtype=f32), *filters, at(3, dtype=torch.float64)), {}),
        (sample.greedy, (at(3, 50, dtype=f32),), {}),
        (sample.softmax_probs, (at(3, 50, dtype=f32), *filters), {}),
        (sample.log_probs, (at(3, 50, dtype=f32), ids(3, dtype=torch.int64), 4), {}),
        (sample.mask, (at(3, 50, dtype=f32), ids(2, dtype=torch.int64), ids(2, 2)), {}),
        (
            sample.penalize,
            (
                at(3, 50, dtype=f32),
                ids(4, dtype=torch.int64),
                ids(7, dtype=torch.int64),
                ids(7),
                *[at(3, dtype=f32)] * 3,
            ),
            {
                "bias_starts": ids(4, dtype=torch.int64),
                "bias_token_ids": ids(5, dtype=torch.int64),
                "bias": at(5, dtype=f32),
            },
        ),
        (media.log_mel, (at(900, dtype=f32), 20), {"out": at(5, 20, dtype=f32)}),
        (media.resize, (ids(40, 30, 3, dtype=torch.uint8), 16, 32), {}),
        (
            media.patches,
            (ids(40, 30, 3, dtype=torch.uint8), 16, 32),
            {"patch_size": 4, "merge_size": 2, "mean": (0.5,) * 3, "std": (0.5,) * 3},
        ),
    ]


def test_all_on_another_device(dtype):
    """The meta device has shapes and no values: an op that asks for a value fails, as does one that makes a tensor on
    the CPU and mixes it in."""
    with backend.use("torch", META):
        called = set()
        for function, arguments, keywords in calls_of_every_op(dtype):
            result = function(*arguments, **keywords)
            for part in result if isinstance(result, tuple) else [result]:
                assert part is None or part.device == META, function.__name__
            if "out" in keywords:
                assert result is keywords["out"], function.__name__
            called.add(function.__name__)
    storage = {"elements_per_token", "empty_pages", "read_pages", "packed_layout", "packed_elements", "packed_scales"}
    storage |= {"unpacked", "pack_weight_rows", "pack_bias", "conv_depth", "pack_values", "pack_quantized"}
    assert (called - {"conv2d"}) | storage == {name for _, name in backend.OPS}


def test_out_is_written(dtype):
    """What is said to be `out` has the numbers, also where it is an input."""
    x, weight, residual = rand(5, 48, dtype=dtype), rand(40, 48, dtype=dtype, seed=1), rand(5, 40, dtype=dtype, seed=2)
    with backend.use("torch"):
        packed = linear.pack_weight(weight)
        expected = linear.linear(x, packed, residual=residual)
        assert torch.equal(linear.linear(x, packed, residual=residual, out=poisoned(5, 40, dtype=dtype)), expected)
        assert linear.linear(x, packed, residual=residual, out=residual) is residual
        assert torch.equal(residual, expected)
        normed = norm.rms_norm(x, weight[0], 1e-6)
        assert torch.equal(norm.rms_norm(x, weight[0], 1e-6, out=x), normed) and torch.equal(x, normed)
