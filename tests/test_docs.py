"""Links and paths of the Markdown pages lead somewhere, and README.md stays short."""

import re

import pytest
from sources import PACKAGE, ROOT

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
