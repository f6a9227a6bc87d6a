"""The wheels that `make wheel` leaves in dist/, installed where no compiler is and no package they do not ask for.

The bare environment is a fresh venv without pip. pip puts the wheel into it from outside, without an index. What the
wheel depends on, directly or not, is linked there from the environment that runs this test rather than downloaded:
torch alone is 200 MB. Nothing else of this environment can be imported there.
"""

import json
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from sources import PACKAGE, ROOT

import tilewright
from tilewright.cli import demo
from tilewright.ops.native import kernels
from tilewright.weights import embedded

pytestmark = pytest.mark.long  # `make wheel` compiles every level, and a demo is run

BUILD_TOOLS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "ld", "as", "make", "cmake", "ninja")

# Loads the model, answers with it on every thread and prints the files of the OpenMP runtimes in the process.
LIST_RUNTIMES = r"""
import json, re, tilewright
with tilewright.Engine(max_context=512, max_sequences=1) as engine:
    engine.chat([{"role": "user", "content": "Hello"}], max_tokens=3)
with open("/proc/self/maps") as maps:
    files = {line.split(maxsplit=5)[5].strip() for line in maps if "/" in line}
print(json.dumps(sorted(file for file in files if re.search(r"/lib(g|i)?omp\d?[-.][^/]*$", file))))
"""


@pytest.fixture(scope="module")
def wheel():
    return only("tilewright-*.whl")


def only(pattern: str) -> Path:
    found = list((ROOT / "dist").glob(pattern))
    assert len(found) == 1, f"{len(found)} wheels of that name in dist: run `make wheel`"
    return found[0]


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """Runs a command of the bare environment; gives its standard output."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    programs = folder / "bin"
    (packages,) = folder.glob("lib/python*/site-packages")
    link_dependencies(wheel, packages)
    install = ["-m", "pip", "--python", str(programs / "python"), "install", "--no-index", "--no-deps"]
    install += [str(wheel), str(only("tilewright_tiny-*.whl"))]
    subprocess.run([sys.executable, *install], check=True, capture_output=True, timeout=120)
    environment = {"PATH": str(programs), "HOME": str(folder), "TILEWRIGHT_CACHE_DIR": "off"}

    def run(program: str, *arguments: str) -> str:
        assert not any(shutil.which(tool, path=environment["PATH"]) for tool in BUILD_TOOLS)
        command = [str(programs / program), *arguments]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def link_dependencies(wheel: Path, target: Path) -> None:
    """Links into `target` the files of every distribution that the wheel needs, as they are installed here."""
    information = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/"
    waiting = requirements(metadata.PathDistribution(zipfile.Path(wheel, information)))
    linked = set()
    while waiting:
        requirement = waiting.pop()
        for name, extra in {(requirement.name, extra) for extra in ("", *requirement.extras)} - linked:
            linked.add((name, extra))
            distribution = metadata.distribution(name)
            waiting += requirements(distribution, extra)
            for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
                if not (target / top).exists():  # several distributions may share a folder
                    (target / top).symlink_to(distribution.locate_file(top))


def requirements(distribution: metadata.Distribution, extra: str = "") -> list[Requirement]:
    """What it needs on this machine, or what one of its extras adds."""
    named = [Requirement(text) for text in distribution.requires or []]
    return [need for need in named if need.marker is None or need.marker.evaluate({"extra": extra})]


def test_the_tags_are_those_of_this_python_and_machine(wheel):
    name, version, _, tags = parse_wheel_filename(wheel.name)
    assert (name, str(version)) == ("tilewright", tilewright.__version__)
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert {(tag.interpreter, tag.abi) for tag in tags} == {(python, python)}
    assert all(re.fullmatch(rf"manylinux_2_\d+_{platform.machine()}", tag.platform) for tag in tags)


def test_it_holds_the_package_whole_and_nothing_else(wheel):
    """The page among it; no tests, no weights, and no folder of libraries that auditwheel would have copied."""
    assert wheel.stat().st_size < 10e6
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    information = f"tilewright-{tilewright.__version__}.dist-info"
    assert {Path(name).parts[0] for name in packed} == {"tilewright", information}
    inside = {name: data for name, data in packed.items() if name.startswith("tilewright/")}
    (library,) = (name for name in inside if ".so" in Path(name).suffixes)
    assert re.fullmatch(rf"tilewright/_kernels\.\S*{platform.machine()}\S*\.so", library)
    del inside[library]
    files = [path for path in PACKAGE.rglob("*") if path.is_file()]
    sources = [path for path in files if path.suffix != ".so" and "__pycache__" not in path.parts]
    expected = {str(Path("tilewright", path.relative_to(PACKAGE))): path.read_bytes() for path in sources}
    assert inside.keys() == expected.keys()
    # Not the bytes themselves, of whose difference pytest would make a text for hours.
    assert [name for name, data in inside.items() if data != expected[name]] == []
    assert "tilewright/server/page/app.js" in inside


def test_only_what_it_names_can_be_imported(run):
    script = "import sys; from importlib.util import find_spec; print(*filter(find_spec, sys.argv[1:]))"
    elsewhere = ["pytest", "transformers", "scikit_build_core", "nanobind", "pip"]
    assert run("python", "-c", script, "torch", "tilewright", *elsewhere).split() == ["torch", "tilewright"]


def test_the_demo_answers(run):
    head, *blocks = run("tilewright", "demo").split("\n\n")
    *about_image, made, about_made, sound, heard, answered = [block.splitlines()[:2] for block in blocks]
    assert "ready in" in head and tuple(question for question, _ in about_image) == demo.QUESTIONS
    description, count, text = (answer for _, answer in about_image)
    assert "red circle" in description and "yellow star" in description
    assert "5 shapes" in count and "HELLO" in text
    assert demo.DRAWN in made[0] and "red circle" in about_made[1] and "blue square" in about_made[1]
    assert sound[1] == embedded.OMNI_NAME
    assert (heard[1], answered[1]) == ("What colour is a banana?", "The colour of the banana is yellow.")


def test_info_names_this_machine_and_a_kernel_of_every_op(run):
    told = json.loads(run("tilewright", "info", "--json"))
    assert told["version"] == tilewright.__version__
    assert told["isa_found"] == kernels.isa_levels()
    assert told["kernels"].keys() == kernels.manifest().keys()


def test_one_openmp_runtime_and_it_is_torchs(run):
    """The linker finds libgomp.so.1 by its SONAME among what torch has loaded, so the machine need not have one."""
    (runtime,) = json.loads(run("python", "-c", LIST_RUNTIMES))
    torch_files = metadata.distribution("torch").files
    libraries = {Path(file.locate()).resolve() for file in torch_files if "gomp" in file.name}
    assert Path(runtime).resolve() in libraries
