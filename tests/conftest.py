"""What tests of kernels and of models share: each ISA level in turn, and both dtypes."""

import pytest
import torch

from tilewright import config
from tilewright.ops.native import kernels


@pytest.fixture(params=kernels.isa_levels())
def isa(request):
    """Runs the test once per ISA level this machine has."""
    kernels.set_max_isa(request.param)
    yield request.param
    kernels.set_max_isa(config.current().max_isa)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def dtype(request):
    return request.param
