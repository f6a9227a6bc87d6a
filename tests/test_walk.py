"""The pages that lead through the code name what there is, where it is."""

import re

import pytest
from code_names import DOTTED, ROOMS, code_names
from sources import ROOT

PAGES = [path for name in ("walk.md", "glossary.md") if (path := ROOT / "docs" / name).exists()]
# Of others, or of a request: nothing that we define.
NOT_OURS = {"POST /v1/chat/completions", "POST /v1/images/generations", "/", "ValueError", "bfmmla"}

PATH = r"`([\w/]+(?:/|\.(?:py|cc|h|js)))`"
NAMED = rf"`((?:\w+/)*{DOTTED})(?:\([^`]*\))?`"
# `Name` (`path`) and `path`: `Name`, the latter with a remark in between or not.
NAME_THEN_PATH = re.compile(rf"{NAMED}\s+\({PATH}")
PATH_THEN_NAME = re.compile(rf"{PATH}(?:\s\([^)]*\))?:\s+{NAMED}")


def spans(page):
    """Code in the text of a page, each once; what is fenced is no text."""
    text = re.sub(r"^```[\s\S]*?^```", "", page.read_text(), flags=re.M)
    return {" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)}


def places(page):
    """(path, name): where the page says that something is."""
    text = page.read_text()
    return [(path, name) for name, path in NAME_THEN_PATH.findall(text)] + PATH_THEN_NAME.findall(text)


def sources_at(path):
    found = [place for room in ROOMS if (place := room / path).exists()]
    files = [file for place in found for file in (place.rglob("*.*") if place.is_dir() else [place])]
    return "\n".join(file.read_text() for file in files if file.suffix in (".py", ".cc", ".h", ".js"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_what_there_is(page):
    wrong = sorted(span for span in spans(page) - NOT_OURS if not code_names().has(span))
    assert not wrong, f"docs/{page.name} names what is not there: {wrong}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_tells_where_it_is(page):
    wrong = []
    for path, name in places(page):
        words = re.findall(r"\w+", name.rpartition("/")[2])
        text = sources_at(path)
        if not all(re.search(rf"\b{word}\b", text) for word in words):
            wrong.append(f"{name} is not in {path}")
    assert not wrong, f"docs/{page.name}: {wrong}"


def test_what_is_not_ours_is_named_and_is_not_ours():
    named = set().union(*(spans(page) for page in PAGES))
    assert named >= NOT_OURS, "what no page names any more goes from the list"
    assert not [span for span in NOT_OURS - {"/"} if code_names().has(span)]


@pytest.mark.parametrize(
    "span",
    ["engine/core.py", "csrc/base/tile.h", "generic.h", "Engine.chat", "engine.chat([])", "weights/load.load",
     "ops.linear", "ops.plan.empty", "Engine(replay=False)", "tilewright info", "--measure", "NormArgs",
     'Op op("rms_norm")', "python benchmarks/shapes.py", "TILEWRIGHT_MAX_ISA"],
)  # fmt: skip
def test_names_that_are_there(span):
    assert code_names().has(span)


@pytest.mark.parametrize(
    "span",
    ["engine/cores.py", "csrc/base/tiles.h", "specific.h", "Engine.chatter", "engine.chatter([])",
     "weights/load.unload", "ops.linearly", "ops.plan.emptied", "Engine(replayed=False)", "tilewright inform",
     "--measured", "NormArgument", 'Op op("rms")', "python benchmarks/none.py", "TILEWRIGHT_NOTHING", "Scheduler.chat"],
)  # fmt: skip
def test_names_that_are_not(span):
    assert not code_names().has(span)


def test_places_are_found():
    assert len(places(ROOT / "docs" / "walk.md")) >= 10
