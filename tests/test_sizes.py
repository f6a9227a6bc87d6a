"""Warns of files and functions that have grown past what reads well; never fails."""

import ast
import warnings

from sources import PACKAGE, ROOT, cpp_files, parse, python_files

MAX_PYTHON_FILE_LINES = 400
MAX_MODEL_FILE_LINES = 350
MAX_CPP_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


def num_lines(path):
    return len(path.read_text().splitlines())


def oversized():
    for path in python_files():
        limit = MAX_MODEL_FILE_LINES if PACKAGE / "models" in path.parents else MAX_PYTHON_FILE_LINES
        if num_lines(path) > limit:
            yield f"{path.relative_to(ROOT)} has {num_lines(path)} lines, over {limit}"
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    yield f"{where}: {node.name} has {length} lines, over {MAX_FUNCTION_LINES}"
    for path in cpp_files():
        if num_lines(path) > MAX_CPP_FILE_LINES:
            yield f"{path.relative_to(ROOT)} has {num_lines(path)} lines, over {MAX_CPP_FILE_LINES}"


def test_sizes():
    for message in oversized():
        warnings.warn(message, stacklevel=1)
