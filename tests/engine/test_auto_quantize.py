"""What is chosen where the user leaves the format to us, and why: by memory, then by speed."""

import pytest

from tilewright.engine.load import loading

GB = 10**9


class Sizes:
    """A checkpoint of 10^9 bf16 values."""

    shapes = {"a.weight": (10**6, 10**3)}  # noqa: RUF012

    def __init__(self, format=None):
        self.format = format

    def quantized_as(self, name):
        return self.format

    def size_bytes(self, name):
        return 2 * GB


@pytest.fixture
def speeds(monkeypatch):
    """Seconds of a product by format."""

    def of(plain, fp8, int8):
        monkeypatch.setattr(loading, "_seconds", {None: plain, "fp8": fp8, "int8": int8}.__getitem__)

    return of


@pytest.mark.parametrize(
    ("seconds", "available", "chosen", "reason"),
    [
        ((2.0, 1.2, 1.0), 8 * GB, "fp8", "1.67 x as fast as in bf16 here, and 1.0 GB fit of 8.0 GB free"),
        ((2.0, 1.9, 1.0), 8 * GB, "int8", "2.00 x as fast"),
        ((1.1, 1.1, 1.0), 8 * GB, None, "fp8 would be 1.00 x as fast here, and 2.0 GB fit"),
        ((1.1, 1.1, 1.0), 2 * GB, "fp8", "1.00 x as fast"),
        ((2.0, 1.0, 1.0), 1.45 * GB, "int8", "1.0 GB fit"),
        ((2.0, 1.0, 1.0), 1.2 * GB, "int4", "int8 would take 1.0 GB of 1.2 GB free"),
    ],
)
def test_choices(speeds, seconds, available, chosen, reason):
    speeds(*seconds)
    found, why = loading._choice(Sizes(), available)
    assert found == chosen and reason in why


def test_a_quantised_checkpoint_stays(speeds):
    assert loading._choice(Sizes(("int4", 32)), GB) == (None, "it is quantised already")


def test_a_product_is_timed(monkeypatch):
    monkeypatch.setattr(loading, "_ROWS", 64)
    monkeypatch.setattr(loading, "_COLUMNS", 64)
    assert all(loading._seconds(name) > 0 for name in (None, "int8", "fp8"))
