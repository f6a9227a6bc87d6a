import pytest
import torch
from helpers import assert_close, poisoned, rand

from tilewright.ops.norm import ada_layer_norm, ada_rms_norm, gated_add
from tilewright.ops.torch_backend import norm as reference

BATCH, LENGTH, FRAMES = 2, 6, 3
# Whose scale, shift and gate are given.
SHARES = {
    "sample": (BATCH,),
    "one of a sample": (BATCH, 1),
    "token": (BATCH, LENGTH),
    "frame": (BATCH, FRAMES, 1),
}


def modulation(share, width, dtype, seed):
    return rand(*SHARES[share], width, dtype=dtype, seed=seed)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("modulation_dtype", [torch.float32, torch.bfloat16], ids=["m32", "m16"])
def test_ada_norms(isa, dtype, modulation_dtype, share, width=33):
    x = rand(BATCH, LENGTH, width, dtype=dtype)
    scale, shift = (modulation(share, width, modulation_dtype, seed) for seed in (1, 2))
    weight, bias = rand(width, seed=3), rand(width, dtype=dtype, seed=4)
    for ours, theirs, affine in [
        (ada_layer_norm, reference.ada_layer_norm, {}),
        (ada_layer_norm, reference.ada_layer_norm, {"weight": weight, "bias": bias}),
        (ada_rms_norm, reference.ada_rms_norm, {"weight": weight, "constant": 0.5}),
    ]:
        expected = theirs(x, scale, shift, 1e-6, **affine)
        out = poisoned(BATCH, LENGTH, width, dtype=dtype)
        assert_close(ours(x, scale, shift, 1e-6, **affine, out=out), expected)
        assert_close(ours(x, scale, None, 1e-6, **affine), theirs(x, scale, None, 1e-6, **affine))
        assert_close(ours(x, None, shift, 1e-6, **affine), theirs(x, None, shift, 1e-6, **affine))
        in_place = x.clone()
        assert torch.equal(ours(in_place, scale, shift, 1e-6, **affine, out=in_place), out)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("gated", [False, True])
def test_with_residual(isa, dtype, share, gated, width=48):
    x, residual = rand(BATCH, LENGTH, width, dtype=dtype), rand(BATCH, LENGTH, width, dtype=dtype, seed=1)
    scale, shift, gate = (modulation(share, width, torch.float32, seed) for seed in (2, 3, 4))
    gate = gate if gated else None
    for ours, theirs in [(ada_layer_norm, reference.ada_layer_norm), (ada_rms_norm, reference.ada_rms_norm)]:
        total, expected_total = residual.clone(), residual.clone()
        y = ours(x, scale, shift, 1e-6, residual=total, gate=gate)
        assert_close(y, theirs(x, scale, shift, 1e-6, residual=expected_total, gate=gate))
        assert_close(total, expected_total)
        # The bits of the two ops one after the other.
        if gated:
            assert torch.equal(total, gated_add(residual, x, gate))
            assert torch.equal(y, ours(total, scale, shift, 1e-6))


@pytest.mark.parametrize("share", SHARES)
def test_gated_add(isa, dtype, share, width=33):
    x, residual = rand(BATCH, LENGTH, width, dtype=dtype), rand(BATCH, LENGTH, width, dtype=dtype, seed=1)
    gate = modulation(share, width, dtype, 2)
    expected = reference.gated_add(residual, x, gate)
    out = gated_add(residual, x, gate, out=poisoned(BATCH, LENGTH, width, dtype=dtype))
    assert_close(out, expected)
    assert torch.equal(gated_add(residual, x, gate, out=residual), out) and torch.equal(residual, out)


def test_slices_of_a_packed_modulation(isa, dtype):
    """A linear gives shift, scale and gate of a block side by side, for each sample or each token."""
    x = rand(BATCH, LENGTH, 40, dtype=dtype)
    for packed in (rand(BATCH, 3, 40, seed=1), rand(BATCH, LENGTH, 3, 40, dtype=dtype, seed=2)):
        shift, scale, gate = packed.unbind(-2)
        assert_close(ada_layer_norm(x, scale, shift, 1e-6), reference.ada_layer_norm(x, scale, shift, 1e-6))
        assert_close(gated_add(x, x, gate), reference.gated_add(x, x, gate))


def test_large_outputs_are_streamed(isa, dtype, two_threads):
    x, scale, shift = rand(1, 2300, 2056, dtype=dtype), rand(1, 2056, seed=1), rand(1, 2056, seed=2)
    out = poisoned(1, 2300, 2056, dtype=dtype)
    assert_close(ada_layer_norm(x, scale, shift, 1e-6, out=out), reference.ada_layer_norm(x, scale, shift, 1e-6))
    out = poisoned(1, 2300, 2056, dtype=dtype)
    assert_close(gated_add(x, x, scale, out=out), reference.gated_add(x, x, scale))


def test_no_tokens(isa):
    assert ada_layer_norm(torch.zeros(2, 0, 8), torch.zeros(2, 8), None, 1e-6).shape == (2, 0, 8)


def test_errors():
    x = torch.zeros(2, 6, 8)
    with pytest.raises(ValueError, match=r"ada_layer_norm: x has shape \[6, 8\], expected \[B, L, C\]"):
        ada_layer_norm(x[0], None, None, 1e-6)
    with pytest.raises(ValueError, match=r"scale has shape \[2, 7\], expected \[..., C=8\]"):
        ada_layer_norm(x, torch.zeros(2, 7), None, 1e-6)
    for wrong in (
        torch.zeros(3, 8),
        torch.zeros(2, 5, 8),
        torch.zeros(2, 4, 1, 8),
        torch.zeros(2, 3, 2, 8),
        torch.zeros(8),
    ):
        with pytest.raises(ValueError, match=r"shift is float32 .*, expected \[B, C\], \[B, L, C\] or \[B, F, 1, C\]"):
            ada_rms_norm(x, None, wrong, 1e-6)
    with pytest.raises(ValueError, match="there is a gate, expected a residual beside it"):
        ada_layer_norm(x, None, None, 1e-6, gate=torch.zeros(2, 8))
    with pytest.raises(ValueError, match="out is the residual, expected other memory"):
        ada_layer_norm(x, None, None, 1e-6, residual=x, out=x)
    with pytest.raises(ValueError, match="residual is bfloat16, expected float32 as x"):
        gated_add(x.bfloat16(), x, torch.zeros(2, 8))
