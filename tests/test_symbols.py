"""What the ISA files export: their kernel tables and nothing else.

A template of std:: or an inline function compiled with AVX-512 flags is a weak symbol; the linker keeps one copy for
the whole library, and if that is the wide one, the scalar path dies on an older machine.
"""

import re
import subprocess

import pytest
from sources import ROOT

from tilewright import config
from tilewright.ops.native import kernels

# Where `make test` and `make dev` build with the flags that are shipped; the sanitizer build has others.
ARCHIVES = [ROOT / "build" / name / "libtilewright_core.a" for name in ("release", "dev")]

# A pointer to the C++ runtime's exception handler, the same whatever the flags: data, no code.
HARMLESS = {"DW.ref.__gxx_personality_v0"}


@pytest.fixture(scope="module")
def exports():
    """{ISA level: the names its objects define for others to link to}"""
    built = [archive for archive in ARCHIVES if archive.exists()]
    assert built, "no library to look into: run `make test` or `make dev`"
    newest = max(built, key=lambda archive: archive.stat().st_mtime)
    command = ["nm", "--demangle", "--defined-only", "--extern-only", str(newest)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {level: set() for level in config.ISA_LEVELS}
    level = None
    for line in listing.splitlines():
        if member := re.fullmatch(r"(\w+)\.cc\.o:", line):
            level = member[1] if member[1] in found else None
        elif level and (symbol := re.fullmatch(r"[0-9a-f]+ \w (.+)", line)):
            found[level].add(symbol[1])
    return found


@pytest.mark.parametrize("level", config.ISA_LEVELS)
def test_isa_files_export_their_kernel_tables_alone(exports, level):
    tables = {f"tilewright::{name}" for entries in kernels.manifest().values() for isa, name in entries if isa == level}
    assert exports[level] - HARMLESS == tables
