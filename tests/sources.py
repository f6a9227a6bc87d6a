"""Where the sources are and how they are read, for the tests that hold the shape of the code."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "tilewright"
CSRC = ROOT / "csrc"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def cpp_files() -> list[Path]:
    return sorted(path for suffix in ("*.h", "*.cc", "*.inc") for path in CSRC.rglob(suffix))


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def module_name(path: Path) -> str:
    names = ("tilewright", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


@functools.cache
def imported_modules(path: Path, also_in_functions: bool = True) -> list[tuple[int, str]]:
    """(line, module) of every import that runs, or that runs when the file is imported; `from a import b` gives a.b."""
    return list(_imports(path, also_in_functions))


def _imports(path: Path, also_in_functions: bool) -> Iterator[tuple[int, str]]:
    package = ("tilewright", *path.relative_to(PACKAGE).parts[:-1])
    for node in _running_nodes(parse(path), also_in_functions):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def _running_nodes(node: ast.AST, also_in_functions: bool) -> Iterator[ast.AST]:
    """The nodes below, without what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        if isinstance(child, FUNCTIONS) and not also_in_functions:
            continue
        yield child
        yield from _running_nodes(child, also_in_functions)
