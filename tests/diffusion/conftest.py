import pytest


@pytest.fixture(autouse=True)
def computes_alone(one_thread):
    """All tests of this folder compute on one thread."""
