"""What the sources define, by name, so that pages which name it can be held to it."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sources import CSRC, FUNCTIONS, PACKAGE, ROOT, cpp_files, parse, python_files

from tilewright.diffusion.options import DiffusionOptions
from tilewright.engine.options import EngineOptions
from tilewright.options import declared

PAGE = PACKAGE / "server" / "page"  # the web page
ROOMS = (ROOT, PACKAGE, CSRC)  # where a path in a page may start
NAME = r"[A-Za-z_]\w*"
DOTTED = rf"{NAME}(?:\.{NAME})*"
NATIVE = "_kernels"  # the native module; Python code knows it as ops.native.kernels


@dataclass
class Definition:
    """A class, a function or a value."""

    members: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    bases: list[str] = field(default_factory=list)


class CodeNames:
    """Every definition of the package, every word of the kernels' and the page's code."""

    def __init__(self) -> None:
        self.modules = {self._module(path): _definitions(parse(path)) for path in python_files()}
        self.modules["kernels"] = _definitions(parse(PACKAGE / f"{NATIVE}.pyi"))
        self.by_name: dict[str, list[Definition]] = defaultdict(list)
        for definitions in self.modules.values():
            for name, definition in definitions.items():
                self.by_name[name].append(definition)
        texts = [re.sub(r"//.*|/\*[\s\S]*?\*/", "", path.read_text()) for path in [*cpp_files(), *PAGE.glob("*.js")]]
        self._words = set(re.findall(NAME, "\n".join(texts)))
        self._words.update(part for module in self.modules for part in module.split("."))
        for name, definitions_of_name in self.by_name.items():
            self._words.add(name)
            for definition in definitions_of_name:
                self._words |= definition.members | definition.parameters
        # Declared options are flags, and parameters of the class that takes them.
        options = {"Engine": [*declared(EngineOptions)], "Diffusion": [*declared(DiffusionOptions)]}
        self._flags = {item.flag for items in options.values() for item in items if item.about.has_flag}
        for name, items in options.items():
            for definition in self.by_name[name]:
                definition.parameters |= {item.name for item in items}
        self._verbatim = "\n".join(path.read_text() for path in [*cpp_files(), *python_files()])

    @staticmethod
    def _module(path: Path) -> str:
        return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")

    def has(self, span: str) -> bool:
        """Whether a code span names something there is: a file, a command, a flag, a definition or a piece of code."""
        if re.fullmatch(r"[\w./]+", span) and self._is_path(span):
            return True
        if command := re.fullmatch(r"(python|tilewright) (\S+)", span):
            program, argument = command.groups()
            return self._is_path(argument) if program == "python" else f'"{argument}"' in self._verbatim
        if re.fullmatch(r"--[a-z-]+|TILEWRIGHT_\w+", span):
            return span in self._flags or f'"{span}"' in self._verbatim
        if call := re.fullmatch(rf"((?:\w+/)*{DOTTED})(?:\((.*)\))?", span):
            name, arguments = call.groups()
            keywords = re.findall(rf"({NAME})=", arguments or "")
            return self._is_defined(name.replace("/", ".").split("."), set(keywords))
        return span in self._verbatim

    def _is_path(self, span: str) -> bool:
        is_header = "/" not in span and span.endswith(".h")  # each op has one of the same name
        return any((room / span).exists() for room in ROOMS) or (is_header and any(CSRC.rglob(span)))

    def _is_defined(self, names: list[str], keywords: set[str]) -> bool:
        if len(names) == 1 and not keywords:
            return names[0] in self._words
        if len(names) == 1:
            return any(keywords <= definition.parameters for definition in self.by_name.get(names[0], []))
        return any(self._is_member(owner, rest) for owner, rest in self._owners(names))

    def _owners(self, names: list[str]) -> Iterator[tuple[dict[str, Definition] | Definition, list[str]]]:
        """Modules and classes that the beginning may mean, each with the rest; `engine.chat` may be an Engine's."""
        for end in range(len(names), 0, -1):
            path = ".".join(names[:end])
            for module, definitions in self.modules.items():
                if f".{module}".endswith(f".{path}"):
                    yield definitions, names[end:]
        class_name = "".join(part.capitalize() for part in names[0].split("_"))
        for name in {names[0], class_name}:
            for definition in self.by_name.get(name, []):
                yield definition, names[1:]

    def _is_member(self, owner: dict[str, Definition] | Definition, names: list[str]) -> bool:
        if not names:
            return True
        if isinstance(owner, Definition):
            return len(names) == 1 and names[0] in self._members(owner)
        return names[0] in owner and self._is_member(owner[names[0]], names[1:])

    def _members(self, definition: Definition) -> set[str]:
        inherited = [base for name in definition.bases for base in self.by_name.get(name, [])]
        return definition.members.union(*(self._members(base) for base in inherited if base is not definition))


@functools.cache
def code_names() -> CodeNames:
    return CodeNames()


def _definitions(tree: ast.AST) -> dict[str, Definition]:
    """What a module or a class has at its top, also within if and try, and what it imports under a name of its own."""
    found: dict[str, Definition] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            found[node.name] = _class(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[node.name] = Definition(parameters={argument.arg for argument in _arguments(node)})
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            found.update((name.id, Definition()) for name in names)
        elif isinstance(node, ast.ImportFrom):
            found.update((alias.asname, Definition()) for alias in node.names if alias.asname)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            found.update(_definitions(node))
    return found


def _class(node: ast.ClassDef) -> Definition:
    own = _definitions(node)
    of_self = {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }
    fields = {child.target.id for child in node.body if isinstance(child, ast.AnnAssign)}
    parameters = own["__init__"].parameters if "__init__" in own else fields
    bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
    return Definition(set(own) | of_self, parameters, bases)


def _arguments(node: ast.AST) -> Iterator[ast.arg]:
    assert isinstance(node, FUNCTIONS)
    yield from (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
