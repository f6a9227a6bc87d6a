"""Copies of the package with an embedded model of random weights, or with none, for processes of their own."""

import os
import shutil
from pathlib import Path

import tilewright

PACKAGE = Path(tilewright.__file__).parent
EMBEDDED = Path("embedded", "tiny_vl")


def copy_package(target: Path, model: Path | None) -> Path:
    """A folder for PYTHONPATH whose tilewright has `model` as its embedded one."""
    package = target / "tilewright"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("tiny_vl", "__pycache__"))
    if model is not None:
        shutil.copytree(model, package / EMBEDDED)
    return target


def environment(path: Path, **variables: str) -> dict[str, str]:
    """The environment of a process that imports from there and computes with one thread."""
    return {
        **os.environ, "PYTHONPATH": str(path), "TILEWRIGHT_NUM_THREADS": "1", "TILEWRIGHT_CACHE_DIR": "off", **variables
    }  # fmt: skip
