"""Links of the Markdown pages lead somewhere, examples have flags and names that exist, and README.md stays short."""

import ast
import re
import subprocess
import sys
import textwrap

import pytest
from examples import command_words, commands_of, help_texts, inputs_of, outputs_of, parse, python_blocks
from sources import PACKAGE, ROOT

from tilewright import cli

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAX_README_LINES = 150


def anchors(page):
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page):
    text = page.read_text()
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_linked_from_the_readme():
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "README.md")}
    assert set((ROOT / "docs").glob("*.md")) <= linked


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
    assert {"README.md", "docs/server.md", "docs/clients/curl.md", "tilewright chat --help"} <= sources


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
