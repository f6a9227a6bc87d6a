"""Where the sources are and how they are read, for the tests that hold the shape of the code."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "tilewright"
CSRC = ROOT / "csrc"


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def cpp_files() -> list[Path]:
    return sorted(path for suffix in ("*.h", "*.cc", "*.inc") for path in CSRC.rglob(suffix))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import that runs, also inside functions; `from a import b` gives a.b."""
    package = ("tilewright", *path.relative_to(PACKAGE).parts[:-1])
    for node in _running_nodes(parse(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def _running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below, without what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _running_nodes(child)
