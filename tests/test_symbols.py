"""What the files of an ISA level export: their kernel tables and nothing else.

A template of std:: or an inline function compiled with the flags of a level is a weak symbol; the linker keeps one copy
for the whole library, and if that is the one of the best level, the scalar path dies on an older machine.
"""

import re
import subprocess

import pytest
from sources import ROOT

from tilewright.ops.native import kernels, read_build

# Where `make test` and `make dev` build with the flags that are shipped; the sanitizer build has others.
BUILDS = [ROOT / "build" / name for name in ("release", "dev")]

# A pointer to the C++ runtime's exception handler, the same whatever the flags: data, no code.
HARMLESS = {"DW.ref.__gxx_personality_v0"}


@pytest.fixture(scope="module")
def build():
    built = [folder for folder in BUILDS if (folder / "libtilewright_base.a").exists()]
    assert built, "no library to look into: run `make test` or `make dev`"
    return max(built, key=lambda folder: (folder / "libtilewright_base.a").stat().st_mtime)


@pytest.mark.parametrize("level", read_build().compiled)
def test_isa_files_export_their_kernel_tables_alone(build, level):
    objects = sorted((build / "CMakeFiles").glob(f"tilewright_*_{level}.dir/**/*.o"))
    command = ["nm", "--demangle", "--defined-only", "--extern-only", *map(str, objects)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    exported = {symbol[1] for line in listing.splitlines() if (symbol := re.fullmatch(r"[0-9a-f]+ \w (.+)", line))}
    tables = {f"tilewright::{op}_{level}" for op, entries in kernels.manifest().items() if level in dict(entries)}
    assert tables and exported - HARMLESS == tables
