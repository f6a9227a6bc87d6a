"""Pages are few and short, what they link to and name exists, and their examples have flags and names that exist."""

import ast
import functools
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from examples import command_words, commands_of, help_texts, inputs_of, outputs_of, parse, python_blocks
from sources import CSRC, PACKAGE, ROOT

from tilewright import cli

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TINY = ROOT / "packages" / "tilewright-tiny"
TRAINING = sorted(TINY.rglob("README.md"))
BASES = (ROOT, PACKAGE, CSRC, TINY, TINY / "src")  # where a path in a page may start
MAX_README_LINES = 150
MAX_PAGES = 26
CURL_FLAGS = {"--fail-with-body", "--retry"}
DOCKER_FLAGS = {"--cap-add", "--cpuset-cpus", "--env-file", "--format"}
UV_FLAGS = {"--torch-backend"}


def anchors(page):
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page):
    text = page.read_text()
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", [*PAGES, *TRAINING], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_first_page_links_to_every_other():
    first = ROOT / "docs" / "README.md"
    linked = {(first.parent / link.partition("#")[0]).resolve() for link in links(first)}
    assert set((ROOT / "docs").rglob("*.md")) - {first} <= linked
    assert "docs/README.md" in links(ROOT / "README.md")


def test_pages_are_few():
    assert len(list((ROOT / "docs").rglob("*.md"))) <= MAX_PAGES, "one page for each question: extend one that is there"


def repository_files():
    """Text that may name pages, without those of checkpoints; CHANGELOG.md tells of pages as they were."""
    rooms = ("src", "csrc", "tests", "benchmarks", "packages", "tools", "deploy", "docs")
    kinds = {".py", ".h", ".cc", ".cu", ".inc", ".md", ".js", ".html", ".json", ".conf", ".service", ""}
    found = (path for room in rooms for path in (ROOT / room).rglob("*") if path.suffix in kinds)
    return [*filter(Path.is_file, found), ROOT / "README.md", ROOT / "pyproject.toml", ROOT / "CMakeLists.txt"]


def test_pages_that_the_code_names_exist():
    pages = {str(page.relative_to(ROOT)) for page in PAGES}
    for path in repository_files():
        text = path.read_bytes().decode(errors="replace")
        missing = set(re.findall(r"(?<!main/)\bdocs/[\w/]+\.md\b", text)) - pages
        assert not missing, f"{path.relative_to(ROOT)} names {missing}"


def named_paths(page):
    """Files and folders that a page names in code spans or runs in its commands, those that begin in a room of ours."""
    text = page.read_text()
    rooms = {entry.name for base in (ROOT, PACKAGE, CSRC) for entry in base.iterdir() if entry.is_dir()}
    spans = re.findall(r"`([\w.]+/[\w./]*)`", text) + re.findall(r"\bpython ((?:benchmarks|tests|docs)/\S+\.py)", text)
    modules = re.findall(r"\bpython -m (training[\w.]+)", text)
    paths = {span for span in spans if span.partition("/")[0] in rooms}
    return paths | {module.replace(".", "/") + ".py" for module in modules}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_that_a_page_names_exist(page):
    missing = [path for path in sorted(named_paths(page)) if not any((base / path).exists() for base in BASES)]
    assert not missing


def test_paths_are_found():
    assert sum(len(named_paths(page)) for page in PAGES) > 150
    assert {"engine/core.py", "tests/models/test_parity.py"} <= named_paths(ROOT / "docs" / "walk.md")


def test_the_glossary_names_files_that_exist():
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| ")]
    places = [row.strip("| ").split(" | ")[-1] for row in rows]
    paths = {path for place in places for path in re.findall(r"`([\w./]+)`", place)}
    assert len(paths) > 20
    missing = [path for path in sorted(paths) if not (PACKAGE / path).exists() and not (ROOT / path).exists()]
    assert not missing


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < MAX_README_LINES


SOURCES = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES} | help_texts()
COMMANDS = [(source, line) for source, text in SOURCES.items() for line in commands_of(text)]


def test_commands_are_found():
    sources = {source for source, _ in COMMANDS}
    assert len(COMMANDS) > 100
    assert {"README.md", "docs/server.md", "docs/clients.md", "tilewright chat --help"} <= sources


@pytest.mark.parametrize("source", sorted({source for source, _ in COMMANDS}))
def test_the_parser_takes_the_commands_of(source):
    for line in commands_of(SOURCES[source]):
        parse(line)


def test_flags_in_the_text_exist():
    """Such as `tilewright info MODEL --load [--quantize int4]` within a sentence, which need not be whole."""
    for source, text in SOURCES.items():
        for mentioned in re.findall(r"`tilewright ([^`]+)`", text):
            words = command_words(re.sub(r"[\[\]|…]", " ", mentioned))
            flags = [word for word in words if word.startswith("--")]
            known = cli._parser()
            while known._subparsers is not None and words and not words[0].startswith("-"):
                choices = known._subparsers._group_actions[0].choices
                known = choices[words.pop(0)]
            assert set(flags) <= set(known._option_string_actions), f"{source}: {mentioned}"


def flags_of(parser):
    flags = set(parser._option_string_actions)
    if parser._subparsers is not None:
        flags.update(*map(flags_of, parser._subparsers._group_actions[0].choices.values()))
    return flags


@functools.cache
def text_of_scripts():
    """Return what has flags and variables of its own: scripts, tests, the build, and what reads the environment."""
    scripts = [path for room in ("benchmarks", "packages", "tests") for path in (ROOT / room).rglob("*.py")]
    build = [ROOT / "CMakeLists.txt", *CSRC.rglob("*.h")]
    return "\n".join(path.read_text() for path in (*scripts, *build, PACKAGE / "config.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_and_variables_that_a_page_names_exist(page):
    named = set(re.findall(r"`(--[a-z][a-z-]+|TILEWRIGHT_[A-Z_]+)", page.read_text()))
    unknown = named - flags_of(cli._parser()) - CURL_FLAGS - DOCKER_FLAGS - UV_FLAGS
    assert not {name for name in unknown if not re.search(rf"(?<![\w-]){name}\b", text_of_scripts())}


def test_targets_of_make_that_pages_name_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [*PAGES, *TRAINING]:
        named = set(re.findall(r"(?:`|^ {4})make ([\w-]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, f"{page.relative_to(ROOT)}: {named - targets}"


@pytest.mark.parametrize("source", sorted({source for source, _ in COMMANDS}))
def test_a_file_that_is_read_is_made_before_or_the_readers_own(source):
    made = set()
    for line in commands_of(SOURCES[source]):
        options = parse(line)
        absent = inputs_of(options) - made
        assert not absent or re.search(r"\bof\s+yours\b", SOURCES[source]), f"{line}: whose are {absent}?"
        made |= outputs_of(options)


def test_python_examples_know_their_names(tmp_path):
    count = 0
    for page in PAGES:
        for number, code in enumerate(python_blocks(page)):
            (tmp_path / f"{page.stem}_{number}.py").write_text(code)
            count += 1
    assert count > 30
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E9,F", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_is_in_fences_where_it_is_checked(page):
    plain = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"^    >>> ", plain, re.MULTILINE)
    for block in re.findall(r"(?:^(?: {4}.*)?\n)+", plain, re.MULTILINE):
        try:
            tree = ast.parse(textwrap.dedent(block))
        except SyntaxError:
            continue
        calls = [node for node in tree.body if isinstance(getattr(node, "value", None), ast.Call)]
        kinds = ast.Import | ast.ImportFrom | ast.With | ast.FunctionDef
        assert not calls and not any(isinstance(node, kinds) for node in tree.body), block
