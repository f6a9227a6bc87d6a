import pytest
import torch

from tilewright.ops.native import kernels


@pytest.fixture(autouse=True)
def one_thread():
    """So little is computed that a second thread would only be waited for, ours or torch's."""
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kernels.set_num_threads(1)
    yield
    kernels.set_num_threads(0)
    torch.set_num_threads(torch_threads)
