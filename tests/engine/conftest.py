import pytest
import torch

from tilewright import config
from tilewright.ops.native import kernels


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Thousands of kernel calls over 24 logits: a second thread would only be waited for."""
    before = torch.get_num_threads()
    kernels.set_num_threads(1)
    torch.set_num_threads(1)
    yield
    kernels.set_num_threads(config.current().num_threads or 0)
    torch.set_num_threads(before)
