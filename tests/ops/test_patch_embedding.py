import pytest
import torch
from helpers import assert_close, rand

from tilewright.ops.media import pack_patch_embedding, patch_embedding


@pytest.mark.parametrize("patch", [14, 16, 5])
@pytest.mark.parametrize("frames", [2, 3])
def test_equals_conv3d(isa, dtype, patch, frames):
    weight, bias = rand(40, 3, frames, patch, patch, dtype=dtype, scale=0.05), rand(40, seed=1)
    clip = rand(7, 3, frames, patch, patch, dtype=dtype, seed=2)
    expected = torch.nn.functional.conv3d(clip.float(), weight.float(), bias, stride=(frames, patch, patch))
    packed = pack_patch_embedding(weight, bias, still=False)
    assert_close(patch_embedding(clip.flatten(1), packed), expected.view(7, 40).to(dtype))


@pytest.mark.parametrize("patch", [14, 16])
def test_a_still_is_a_clip_of_equal_frames(isa, dtype, patch):
    weight = rand(40, 3, 2, patch, patch, dtype=dtype, scale=0.05)
    still = rand(7, 3, 1, patch, patch, dtype=dtype, seed=2)
    expected = torch.nn.functional.conv3d(still.expand(-1, -1, 2, -1, -1).float(), weight.float())
    packed = pack_patch_embedding(weight, still=True)
    # The summed kernel is rounded to bf16 once more than its parts were.
    assert_close(
        patch_embedding(still.flatten(1), packed),
        expected.view(7, 40).to(dtype),
        atol=2e-2 if dtype == torch.bfloat16 else None,
    )


def test_a_still_of_bf16_weights_in_fp32(isa):
    """Nothing is rounded on the way: the sum of two bf16 numbers is no bf16 number."""
    weight = rand(40, 3, 2, 16, 16, dtype=torch.bfloat16, scale=0.05)
    still = rand(7, 3, 1, 16, 16, seed=2)
    expected = torch.nn.functional.conv3d(still.expand(-1, -1, 2, -1, -1), weight.float())
    packed = pack_patch_embedding(weight, still=True, dtype=torch.float32)
    assert_close(patch_embedding(still.flatten(1), packed), expected.view(7, 40))


def test_errors():
    with pytest.raises(ValueError, match=r"shape \[4, 3\], expected \[D, C, frames, P, P\]"):
        pack_patch_embedding(torch.zeros(4, 3), still=True)
