"""The chart of README.md: drawn from the committed figures, which are those of docs/benchmarks.md."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from sources import ROOT

FIGURES = ROOT / "benchmarks" / "figures" / "peers.json"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def plot_peers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import plot_peers

    return plot_peers


@pytest.fixture
def document():
    return json.loads(FIGURES.read_text())


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_committed_charts_show_the_committed_figures(plot_peers, document, theme):
    committed = (ROOT / "docs" / "images" / f"peers_{theme}.svg").read_text()
    assert committed == plot_peers.draw(document, plot_peers.THEMES[theme]), "run python benchmarks/plot_peers.py"


def test_figures_are_those_of_the_benchmarks_page(document):
    section = (ROOT / "docs" / "benchmarks.md").read_text().split("## Beside other engines")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    names = [workload["name"] for workload in document["workloads"]]
    assert [heading.split(":")[0] for heading in rows[0][2:]] == names
    assert {row[0]: row[2:] for row in rows[2:] if row[1] != "int8"} == {
        engine["engine"]: [engine["figures"][name] for name in names] for engine in document["engines"]
    }


def test_every_bar_has_its_origin(document):
    for engine in document["engines"]:
        assert all(engine[key] for key in ("engine", "version", "weights", "date", "source")), engine["engine"]
        assert set(engine["figures"]) == {workload["name"] for workload in document["workloads"]}
    assert document["engines"][0]["engine"] == "Tilewright" and document["engines"][0]["commit"]


def test_bars_are_as_long_as_their_figures(plot_peers, document):
    root = ElementTree.fromstring(plot_peers.draw(document, plot_peers.THEMES["light"]))
    ours = [path for path in root.iter(f"{SVG}path") if path.get("fill") == plot_peers.THEMES["light"].own_bar]
    others = [path for path in root.iter(f"{SVG}path") if path.get("fill") == plot_peers.THEMES["light"].bar]
    assert (len(ours), len(others)) == (4, 19)  # five rivals with four figures each, one of them failed

    def length(path):
        return float(path.get("d").split("h")[1].split("a")[0]) + 3  # and the rounded corner

    widths = [length(path) for path in ours]
    full = plot_peers.COLUMN_WIDTH - plot_peers.LABEL_WIDTH
    assert widths == pytest.approx([full, full, full * 3.3 / 23.2, full * 6.3 / 16.4], abs=0.1)
    assert max(map(length, others)) == pytest.approx(full, abs=0.1)


def test_a_failed_run_has_no_bar_and_a_range_its_middle(plot_peers):
    assert plot_peers.value_of("failed") is None
    assert plot_peers.value_of("3.8-3.9") == pytest.approx(3.85)
    assert plot_peers.value_of("909") == 909


def test_a_name_cannot_break_the_file(plot_peers, document):
    document["engines"][1]["engine"] = "<&>"
    texts = ElementTree.fromstring(plot_peers.draw(document, plot_peers.THEMES["dark"])).iter(f"{SVG}text")
    assert "<&>" in [text.text for text in texts]
