import pytest

from tilewright.ops.native import kernels


@pytest.fixture
def two_threads():
    """Two kernel threads whatever the machine has: some choices go by size per thread."""
    kernels.set_num_threads(2)
    yield
    kernels.set_num_threads(0)
