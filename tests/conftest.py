"""What tests of kernels, models and images share: ISA levels, both dtypes, one thread, a gate."""

import hypothesis
import pytest
import torch
from fuzzing import num_cases

from tilewright import config
from tilewright.ops.native import kernels

# Levels that differ from the one below in products of bytes alone: only tests of quantised weights go through them.
BYTE_LEVELS = ("avx512_vnni",)
MADE_OF = {"moe": ("moe", "linear")}  # ops whose kernels are also others'

hypothesis.settings.register_profile("tilewright", max_examples=num_cases(100), deadline=None)
hypothesis.settings.load_profile("tilewright")


def pytest_addoption(parser):
    parser.addoption(
        "--level",
        action="append",
        choices=(*kernels.isa_levels(), "all"),
        help="run tests of kernels at this ISA level instead of the best one and scalar; may be repeated",
    )


def pytest_collection_modifyitems(items):
    """Marks tests of random cases, of which `make test-long` runs many more."""
    for item in items:
        if item.get_closest_marker("hypothesis"):
            item.add_marker("fuzz")


def isa_levels(config: pytest.Config, op: str | None = None, *, with_bytes: bool = False) -> list[str]:
    """Return the levels to test at: scalar and the best one, unless --level names others.

    The C++ tests go through every level (csrc/testing/testing.h); what Python adds, bindings and models, is the same
    at all of them. For an op, the levels are those at which it has a kernel of its own.
    """
    levels = [level for level in kernels.isa_levels() if with_bytes or level not in BYTE_LEVELS]
    if op is not None:
        own = {level for part in MADE_OF.get(op, (op,)) for level, _ in kernels.manifest()[part]}
        levels = [level for level in levels if level in own]
    chosen = config.getoption("--level") or [levels[0], levels[-1]]
    return levels if "all" in chosen else [level for level in levels if level in chosen]


def pytest_generate_tests(metafunc):
    """Runs a test that asks for `isa` once per level; one of tests/ops/test_<op>.py at those its op has kernels for."""
    if "isa" in metafunc.fixturenames:
        op = metafunc.module.__name__.rpartition(".")[2].removeprefix("test_")
        with_bytes = getattr(metafunc.module, "MULTIPLIES_BYTES", False)
        levels = isa_levels(metafunc.config, op if op in kernels.manifest() else None, with_bytes=with_bytes)
        metafunc.parametrize("isa", levels, indirect=True)


@pytest.fixture
def isa(request):
    """The level that kernels are capped at."""
    kernels.set_max_isa(request.param)
    yield request.param
    kernels.set_max_isa(config.current().max_isa)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def dtype(request):
    return request.param


@pytest.fixture
def one_thread():
    """So little is computed that a second thread would only be waited for, ours or torch's."""
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kernels.set_num_threads(1)
    yield
    kernels.set_num_threads(0)
    torch.set_num_threads(torch_threads)


@pytest.fixture
def gate(tmp_path):
    """What steps of FakeDiffusion wait for."""
    from fake_diffusion import Gate  # imports the server, which most tests have nothing to do with

    gate = Gate(tmp_path)
    yield gate
    gate.close()
