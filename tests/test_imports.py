"""The direction of imports: each part knows only what lies below it."""

import ast
import re
import subprocess
import sys

import pytest
from sources import PACKAGE, ROOT, cpp_files, imported_modules, module_name, parse, python_files


def levels() -> list[list[str]]:
    """The rooms as docs/walk.md lists them, from top to bottom: the one place that says who may import whom.

    A room imports from lower levels and from itself, never from its own level or a higher one.
    """
    (block,) = re.findall(r"^    cli -> [\s\S]*?\n\n", (ROOT / "docs" / "walk.md").read_text(), flags=re.M)
    return [["__main__"], *(re.findall(r"\w+", row.replace("csrc", "_kernels")) for row in block.split("->"))]


LEVELS = levels()
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}

# Without torch, so that the server starts, and --help answers, at once.
FREE_OF_TORCH = ["cli", "batch", "flags", "config", "host", "options", "process", "types", "outputs", "server"]


def part_of(module: str) -> str | None:
    """The part of the package a module belongs to; None for other packages and for tilewright.__version__."""
    names = module.split(".")
    if names[0] != "tilewright" or len(names) < 2 or re.fullmatch(r"__\w+__", names[1]):
        return None
    return names[1]


def files_of_parts():
    for path in python_files():
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part != "__init__":  # the package's face: it may name any part, lazily
            yield part, path


def test_every_part_has_a_level():
    unknown = {part for part, _ in files_of_parts()} - set(LEVEL_OF)
    assert not unknown, f"give {sorted(unknown)} a place in the list of docs/walk.md"


def test_every_level_has_its_parts():
    gone = set(LEVEL_OF) - {part for part, _ in files_of_parts()} - {"_kernels"}
    assert not gone, f"docs/walk.md lists {sorted(gone)}, which are not there"


def test_imports_go_down():
    wrong = []
    for part, path in files_of_parts():
        for line, module in imported_modules(path):
            target = part_of(module)
            if target is None or target == part:
                continue
            if LEVEL_OF.get(target, -1) <= LEVEL_OF[part]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {part} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_only_ops_knows_the_native_module():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for part, path in files_of_parts()
        for line, module in imported_modules(path)
        if part_of(module) == "_kernels" and part != "ops"
    ]
    assert not wrong, f"only tilewright.ops imports _kernels, not {wrong}"


def test_only_layers_linear_multiplies_by_weights():
    """One place decides about format, ranks and adapters: no model and no other layer calls these kernels."""
    products = {"tilewright.ops.linear": {"linear"}, "tilewright.ops.moe": {"moe"}}
    wrong = []
    for part, path in files_of_parts():
        if part not in ("layers", "models") or path == PACKAGE / "layers" / "linear.py":
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and {name.name for name in node.names} & products.get(
                node.module or "", set()
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, f"use layers.linear instead of the ops at {wrong}"


@pytest.mark.parametrize("part", FREE_OF_TORCH)
def test_no_torch(part):
    """Neither by an import of its own, in a function or not, nor through what its files import at their top."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for owner, path in files_of_parts()
        if owner == part
        for line, module in imported_modules(path)
        if is_torch(module)
    ]
    assert not wrong, f"{part} imports torch at {wrong}"
    ways = [way_to_torch(module_name(path)) for owner, path in files_of_parts() if owner == part]
    assert not any(ways), "\n".join(" -> ".join(way) for way in ways if way)


def is_torch(module: str) -> bool:
    return module.split(".")[0] == "torch"


def way_to_torch(module: str) -> list[str]:
    """The shortest chain of imports at the top of our files that ends with torch; empty where there is none."""
    files = {module_name(path): path for path in python_files()}
    ways = {module: [module]}
    queue = [module]
    while queue:
        name = queue.pop(0)
        if is_torch(name):
            return ways[name]
        for _, target in imported_modules(files[name], also_in_functions=False):
            # a.b.c imports a, a.b and a.b.c, as far as these are modules and not names in one.
            names = target.split(".")
            for package in (".".join(names[:end]) for end in range(1, len(names) + 1)):
                if package not in ways and (package in files or package == "torch"):
                    ways[package] = [*ways[name], package]
                    queue.append(package)
    return []


def test_a_way_to_torch_is_found():
    way = way_to_torch("tilewright.engine.engine")
    assert len(way) > 2 and way[-1] == "torch", "it imports none, but others that do"
    assert way_to_torch("tilewright") == [], "the package's face does so in a function"


def test_no_torch_in_a_process_that_imports_them_all():
    """What other packages bring along is seen only here."""
    free = [module_name(path) for part, path in files_of_parts() if part in FREE_OF_TORCH]
    modules = [module for module in free if not module.rpartition(".")[2].startswith("ray_")]  # an extra's
    command = "import sys\n" + "".join(
        f"import {module}\nassert 'torch' not in sys.modules, '{module} brings torch along'\n" for module in modules
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_engine_needs_no_package_of_other_parts():
    """Neither the server's, nor the one that decodes media, nor the one of constraints: these load where they are used.

    A machine with a GPU may have torch and little else.
    """
    absent = ["llguidance", "fastapi", "uvicorn", "av"]
    command = f"import sys\nsys.modules.update(dict.fromkeys({absent}))\nimport tilewright.engine.engine\n"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_config_reads_the_environment():
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    wrong = []
    for path in python_files():
        if path == PACKAGE / "config.py":
            continue
        for node in ast.walk(parse(path)):
            used = {node.attr} if isinstance(node, ast.Attribute) else set()
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                used = {alias.name for alias in node.names}
            if used & names:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    for path in cpp_files():
        if re.search(r"\bgetenv\s*\(", path.read_text()):
            wrong.append(str(path.relative_to(ROOT)))
    assert not wrong, f"only config.py reads the environment, not {wrong}"


def test_files_are_read_and_written_in_one_place():
    """`files` knows what must not be read: the others read what the kernel or this package wrote."""
    names = {"read_text", "read_bytes", "write_text", "write_bytes"}
    others = {"host/files.py", "host/memory.py", "host/topology.py", "engine/measure/memory.py", "process/state.py"}
    others |= {"process/confine.py", "ops/torch_backend/gpu_kernels.py", "server/http/page_files.py"}
    wrong = []
    for path in python_files():
        for node in ast.walk(parse(path)):
            called = node.func if isinstance(node, ast.Call) else None
            if not isinstance(called, ast.Attribute) or called.attr not in names:
                continue
            if ast.unparse(called.value) != "files" and str(path.relative_to(PACKAGE)) not in others:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "use tilewright.host.files:\n" + "\n".join(wrong)
