"""What tests compare with or need beside the package: where it is absent they are skipped, but not in CI."""

import importlib
import os
from types import ModuleType

import pytest


def require(name: str) -> ModuleType:
    """The module; without it the test is skipped, or fails where CI is set, as a skip there would go unseen."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A part of it that is missing, or one that has moved, is a fault wherever the tests run.
        if error.name != name.partition(".")[0]:
            raise
        reason = f"{name} is not installed: `make test` sets up all that tests need"
        if os.environ.get("CI", "").lower() in ("", "0", "false"):
            pytest.skip(reason)
        pytest.fail(f"{reason} (CI is set, so the test must not be left out)")
