"""deploy/grafana.json and docs/deploy.md tell of the metrics that the server has, and of all of them."""

import json
import re
import runpy
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sources import ROOT

from tilewright.engine.measure.stats import Stats
from tilewright.server.http.metrics import Metrics
from tilewright.server.link.diffusion import DiffusionBackend
from tilewright.server.link.service import EngineService

NAME = re.compile(r"tilewright_\w+")
# Of what is exposed, what the dashboard leaves out on purpose: nothing.
LEFT_OUT: set[str] = set()
ADDED_BY_PROMETHEUS = {"instance"}


@pytest.fixture(scope="module")
def exposed():
    """All that /metrics can say, as text: with an engine and a worker for images, and after a request."""
    engine = SimpleNamespace(stats=lambda: Stats(**dict.fromkeys(Stats.__dataclass_fields__, 1.0)))
    service = EngineService(engine, emit=print, limits=(1.0, 1.0))
    metrics = Metrics()
    metrics.count_request("/v1/completions", 200, 1.0)
    diffusion = DiffusionBackend("draw", {}, {}).stats()
    return metrics.text(service.stats(), 0, diffusion).decode()


@pytest.fixture(scope="module")
def labels(exposed):
    """The labels of every sample, by its name."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposed):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.fixture(scope="module")
def dashboard():
    return json.loads((ROOT / "deploy" / "grafana.json").read_text())


def queries(dashboard):
    return [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_every_query_names_existing_metrics(dashboard, labels):
    assert queries(dashboard)
    for title, query in queries(dashboard):
        names = NAME.findall(query)
        assert names and set(names) <= set(labels), f"{title}: {set(names) - set(labels)}"
        known = set.union(*(labels[name] for name in names)) | ADDED_BY_PROMETHEUS
        grouped = {label for group in re.findall(r"\bby \(([^)]*)\)", query) for label in re.findall(r"\w+", group)}
        matched = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query))
        assert grouped | matched <= known, f"{title}: {grouped | matched} of {known}"


def test_every_metric_is_drawn(dashboard, exposed):
    queried = {name for _, query in queries(dashboard) for name in NAME.findall(query)}
    for name, kind in re.findall(r"# TYPE (\S+) (\S+)", exposed):
        samples = {f"{name}_bucket", f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name}
        assert bool(samples & queried) != (name in LEFT_OUT), name


def test_counters_are_drawn_as_rates(dashboard, exposed):
    kinds = dict(re.findall(r"# TYPE (\S+) (\S+)", exposed))
    for title, query in queries(dashboard):
        for name in NAME.findall(query):
            is_counted = kinds.get(name) != "gauge"
            is_rate = re.search(rf"(?:rate|increase)\({name}{{[^}}]*}}\[\$__\w+\]\)", query) is not None
            assert is_counted == is_rate, f"{title}: {name}"


def test_the_file_is_what_the_script_writes():
    script = runpy.run_path(str(ROOT / "tools" / "dashboard.py"))
    assert script["PATH"].read_text() == script["text"](), "run python tools/dashboard.py"


def test_docs_list_every_metric_as_the_server_does(exposed, labels):
    page = (ROOT / "docs" / "deploy.md").read_text()
    kinds, says = (dict(re.findall(rf"# {word} (\S+) (.*)", exposed)) for word in ("TYPE", "HELP"))
    table = re.findall(r"^\| `(tilewright_\w+)` \| (\w+) \| (.*) \|$", page, re.MULTILINE)
    assert table == [(name, kind, says[name]) for name, kind in kinds.items()]
    assert set(NAME.findall(page)) <= set(labels) | set(kinds)
