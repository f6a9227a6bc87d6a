"""The number of random cases of a test: few in `make test`, many in `make test-long`."""

import os

LONG = 20


def num_cases(few: int) -> int:
    """Return `few`, or many times as many where TILEWRIGHT_TEST_FUZZ=long asks for long fuzzing."""
    return few * LONG if os.environ.get("TILEWRIGHT_TEST_FUZZ") == "long" else few
