"""Writes deploy/grafana.json, the dashboard of what /metrics exposes: python tools/dashboard.py

In queries, `@name` stands for the metric tilewright_name of the chosen servers, `@name{status="200"}` for those of its
series, [rate] and [range] for Grafana's intervals. Panels are laid side by side in the order of the list, 24 columns in
a line.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[1] / "deploy" / "grafana.json"
COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
SERVERS = "label_values(tilewright_engine_ready, instance)"


@dataclass(frozen=True)
class Row:
    """A heading over the panels behind it."""

    title: str
    width: int = COLUMNS
    height: int = 1

    def fields(self) -> dict[str, Any]:
        return {"type": "row", "title": self.title, "collapsed": False, "panels": []}


@dataclass(frozen=True)
class Graph:
    """Curves over time; of `queries` the names stand in the legend. Shares end at 1."""

    title: str
    description: str
    width: int
    queries: Mapping[str, str]
    unit: str = "none"
    is_stacked: bool = False
    height: int = 8

    def fields(self) -> dict[str, Any]:
        custom = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 20 if self.is_stacked else 5}
        custom |= {"showPoints": "never", "spanNulls": False}
        custom["stacking"] = {"mode": "normal" if self.is_stacked else "none", "group": "A"}
        defaults = {"unit": self.unit, "min": 0, "color": {"mode": "palette-classic"}, "custom": custom}
        if self.unit == "percentunit":
            defaults["max"] = 1
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
        return panel("timeseries", self, defaults, options)


@dataclass(frozen=True)
class Stat:
    """The last value as a number, in the colour of the highest bound below it; None: of all below the first one."""

    title: str
    description: str
    width: int
    queries: Mapping[str, str]
    colors: Mapping[float | None, str]
    unit: str = "none"
    decimals: int | None = None
    words: Mapping[int, tuple[str, str]] | None = None  # in the place of values: text and colour
    height: int = 4

    def fields(self) -> dict[str, Any]:
        steps = [{"color": color, "value": value} for value, color in self.colors.items()]
        defaults: dict[str, Any] = {"unit": self.unit, "color": {"mode": "thresholds"}}
        defaults |= {"thresholds": {"mode": "absolute", "steps": steps}, "mappings": []}
        if self.words:
            words = {
                str(value): {"text": text, "color": color, "index": index}
                for index, (value, (text, color)) in enumerate(self.words.items())
            }
            defaults["mappings"] = [{"type": "value", "options": words}]
        if self.decimals is not None:
            defaults["decimals"] = self.decimals
        options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
        options |= {"colorMode": "value", "graphMode": "area"}
        options |= dict.fromkeys(("justifyMode", "orientation", "textMode"), "auto")
        return panel("stat", self, defaults, options)


def panel(kind: str, of: Graph | Stat, defaults: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    targets = [
        {"datasource": SOURCE, "refId": letter, "expr": expression(query), "legendFormat": legend}
        for letter, (legend, query) in zip(string.ascii_uppercase, of.queries.items(), strict=False)
    ]
    return {
        "type": kind,
        "title": of.title,
        "description": of.description,
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
    }


def expression(query: str) -> str:
    """Return the query in PromQL."""

    def selected(match: re.Match[str]) -> str:
        more = f",{match[2]}" if match[2] else ""
        return f'tilewright_{match[1]}{{instance=~"$instance"{more}}}'

    query = re.sub(r"@(\w+)(?:\{(.*?)\})?", selected, query)
    return query.replace("[rate]", "[$__rate_interval]").replace("[range]", "[$__range]")


def quantiles(histogram: str, *shares: float) -> dict[str, str]:
    """Return the query of each quantile of a histogram."""
    name, brace, labels = histogram.partition("{")
    series = f"@{name}_bucket{brace}{labels}[rate]"
    return {f"p{share * 100:g}": f"histogram_quantile({share}, sum by (le) (rate({series})))" for share in shares}


PANELS: list[Row | Graph | Stat] = [
    Row("Health"),
    Stat(
        "Engine",
        "Whether every chosen server has an engine that answers.",
        3,
        {"": "min(@engine_ready)"},
        colors={None: "red", 1: "green"},
        words={0: ("down", "red"), 1: ("ready", "green")},
    ),
    Stat(
        "Replicas",
        "Engines that answer; more than one with --replicas.",
        3,
        {"": "sum(@replicas)"},
        colors={None: "red", 1: "green"},
        decimals=0,
    ),
    Stat(
        "Engines started anew",
        "In the time shown. More than one now and then: see the server's log.",
        6,
        {"": "sum(increase(@engine_restarts_total[range]))"},
        colors={None: "green", 1: "orange", 3: "red"},
        decimals=0,
    ),
    Stat(
        "Requests that fail by our fault",
        "Share with a status of 5xx.",
        6,
        {
            "": (
                '(sum(rate(@requests_total{status=~"5.."}[rate])) or vector(0)) / (sum(rate(@requests_total[rate])) '
                "> 0) or vector(0)"
            )
        },
        unit="percentunit",
        colors={None: "green", 0.001: "orange", 0.01: "red"},
        decimals=2,
    ),
    Stat(
        "Sent away",
        "Requests refused with status 429 in the time shown, because too many waited.",
        6,
        {"": "sum(increase(@requests_refused_total[range]))"},
        colors={None: "green", 1: "orange"},
        decimals=0,
    ),
    Row("Traffic"),
    Graph(
        "Requests by status",
        "",
        8,
        {"{{status}}": "sum by (status) (rate(@requests_total[rate]))"},
        unit="reqps",
        is_stacked=True,
    ),
    Graph(
        "Requests by path",
        "",
        8,
        {"{{path}}": "sum by (path) (rate(@requests_total[rate]))"},
        unit="reqps",
        is_stacked=True,
    ),
    Graph(
        "Refused",
        "Requests sent away with status 429.",
        8,
        {
            "refused": "sum(rate(@requests_refused_total[rate]))",
            "connections refused": "sum(rate(@connections_refused_total[rate]))",
        },
        unit="reqps",
    ),
    Graph(
        "Under way",
        "Requests the server is answering; answers the engine computes, and those that wait for a step or "
        "are being prepared.",
        24,
        {
            "in flight": "sum(@requests_in_flight)",
            "running": "sum(@requests_running)",
            "waiting": "sum(@requests_waiting)",
            "preparing": "sum(@requests_preparing)",
        },
    ),
    Row("Latency"),
    Graph("Time to first token", "", 8, quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99), unit="s"),
    Graph("Between tokens", "", 8, quantiles("inter_token_seconds", 0.5, 0.95), unit="s"),
    Graph(
        "Requests",
        "From the request to its last byte, where something is generated.",
        8,
        quantiles('request_seconds{path=~"/v1/(chat/completions|completions|responses)"}', 0.5, 0.95, 0.99),
        unit="s",
    ),
    Row("Throughput"),
    Graph(
        "Tokens per second",
        "Prompt tokens computed, those found in a cache left out, and tokens generated.",
        12,
        {"prompt": "sum(@prompt_tokens_per_second)", "output": "sum(@output_tokens_per_second)"},
    ),
    Graph(
        "Tokens of a request",
        "Means of those answered.",
        12,
        {
            "prompt": "sum(rate(@prompt_tokens_sum[rate])) / sum(rate(@prompt_tokens_count[rate]))",
            "output": "sum(rate(@output_tokens_sum[rate])) / sum(rate(@output_tokens_count[rate]))",
        },
    ),
    Row("The machine"),
    Graph(
        "Share of the machine's limits",
        "What the engine's steps reach of the read bandwidth (decoding is bound by it) and of the GEMM peak "
        "(long prompts and images are).",
        12,
        {"bandwidth {{instance}}": "@bandwidth_ratio", "GEMM {{instance}}": "@gemm_ratio"},
        unit="percentunit",
    ),
    Graph(
        "Time in steps",
        "Share of the time that the engine computes.",
        6,
        {"{{instance}}": "rate(@step_seconds_total[rate])"},
        unit="percentunit",
    ),
    Graph(
        "A step",
        "Mean seconds.",
        6,
        {"{{instance}}": "rate(@step_seconds_total[rate]) / rate(@steps_total[rate])"},
        unit="s",
    ),
    Stat(
        "Read bandwidth",
        "Measured when the engine started.",
        12,
        {"{{instance}}": "@bandwidth_bytes_per_second"},
        unit="Bps",
        colors={None: "blue"},
    ),
    Stat(
        "GEMM peak",
        "Measured when the engine started.",
        12,
        {"{{instance}}": "@gemm_flops_per_second"},
        unit="flops",
        colors={None: "blue"},
    ),
    Row("Caches"),
    Graph(
        "Pages for keys and values in use",
        "At the top, answers are sent back to wait.",
        8,
        {
            "{{instance}}": "@kv_pages_used / @kv_pages",
            "{{instance}}, encoder states": "@cross_attention_pages_used / @cross_attention_pages",
            "{{instance}}, slots of recurrent states": "@state_slots_used / @state_slots",
            "{{instance}}, sliding windows": "@kv_window_pages_used / @kv_window_pages",
        },
        unit="percentunit",
    ),
    Graph(
        "Prompt tokens found in the prefix cache",
        "Now, and since the engine started.",
        8,
        {
            "now": (
                "sum(rate(@cached_prompt_tokens_total[rate])) / (sum(rate(@cached_prompt_tokens_total[rate])) + "
                "sum(rate(@computed_prompt_tokens_total[rate])))"
            ),
            "since the start {{instance}}": "@prefix_cache_hit_ratio",
            "{{instance}}, answers that found a state": "@state_cache_hit_ratio",
        },
        unit="percentunit",
    ),
    Graph(
        "Images and videos whose features were kept",
        "Since the engine started.",
        8,
        {"{{instance}}": "@feature_cache_hit_ratio", "{{instance}}, encoder states": "@cross_attention_hit_ratio"},
        unit="percentunit",
    ),
    Graph(
        "Prompt tokens",
        "Found in the prefix cache, and computed.",
        5,
        {
            "cached per second": "sum(rate(@cached_prompt_tokens_total[rate]))",
            "computed per second": "sum(rate(@computed_prompt_tokens_total[rate]))",
        },
        is_stacked=True,
    ),
    Graph(
        "Preemptions",
        "Answers sent back to wait because pages ran out, per second.",
        5,
        {"{{instance}}": "rate(@preemptions_total[rate])"},
    ),
    Graph(
        "Drafts that were right",
        "Share of the tokens guessed ahead.",
        5,
        {"{{instance}}": "rate(@accepted_draft_tokens_total[rate]) / rate(@draft_tokens_total[rate])"},
        unit="percentunit",
    ),
    Graph("Features kept", "Of images and videos.", 5, {"{{instance}}": "@feature_cache_bytes"}, unit="bytes"),
    Graph(
        "States kept", "Of recurrent layers, at ends of pages.", 4, {"{{instance}}": "@state_snapshots"}, unit="short"
    ),
    Row("Images"),
    Graph(
        "Images made",
        "Per minute, and what was cancelled.",
        6,
        {
            "images {{instance}}": "60 * rate(@pictures_total[rate])",
            "videos {{instance}}": "60 * rate(@videos_total[rate])",
            "cancelled {{instance}}": "60 * rate(@pictures_cancelled_total[rate])",
        },
    ),
    Graph(
        "Seconds per step",
        "Of images and videos.",
        6,
        {"{{instance}}": "rate(@picture_step_seconds_sum[rate]) / rate(@picture_step_seconds_count[rate])"},
        unit="s",
    ),
    Graph(
        "Seconds per request",
        "From the worker getting it to its files.",
        6,
        quantiles("picture_seconds", 0.5, 0.95),
        unit="s",
    ),
    Graph(
        "Queue of images",
        "",
        4,
        {"waiting {{instance}}": "@pictures_waiting", "being made {{instance}}": "@pictures_running"},
    ),
    Graph(
        "Diffusion worker",
        "1 while its process runs, and how often it was restarted.",
        2,
        {
            "runs {{instance}}": "@picture_worker_ready",
            "restarts {{instance}}": "increase(@picture_worker_restarts_total[rate])",
        },
    ),
    Graph(
        "Memory",
        "Of the engine: its process in all and its pages of files, weights and those of them that are "
        "mapped, pages for keys and values, those written and those in use, results of ops, and the rest.",
        24,
        {
            "resident, {{instance}}": "@engine_resident_bytes",
            "weights, {{instance}}": "@weight_bytes",
            "KV pages, {{instance}}": "@kv_bytes",
            "KV in use, {{instance}}": "@kv_bytes_used",
            "scratch, {{instance}}": "@scratch_bytes",
            "weights mapped, {{instance}}": "@mapped_weight_bytes",
            "KV written, {{instance}}": "@kv_bytes_touched",
            "resident, files, {{instance}}": "@engine_resident_file_bytes",
            "other, {{instance}}": "@engine_other_bytes",
        },
        unit="bytes",
    ),
]


def dashboard() -> dict[str, Any]:
    placed, x, y, height = [], 0, 0, 0
    for number, item in enumerate(PANELS, 1):
        if x + item.width > COLUMNS:
            x, y = 0, y + height
        height = item.height
        placed.append({"id": number, **item.fields(), "gridPos": {"x": x, "y": y, "w": item.width, "h": height}})
        x += item.width
    return {
        "title": "Tilewright",
        "uid": "tilewright",
        "description": "What /metrics tells of Tilewright's servers; docs/deploy.md says what each figure means.",
        "tags": ["tilewright"],
        "schemaVersion": 42,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "links": [],
        "annotations": {"list": []},
        "fiscalYearStartMonth": 0,
        "liveNow": False,
        "preload": False,
        "templating": {"list": [data_source(), servers()]},
        "panels": placed,
    }


def data_source() -> dict[str, Any]:
    chosen = {"regex": "", "hide": 0, "includeAll": False, "multi": False, "options": [], "refresh": 1}
    named = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {**named, **chosen, "skipUrlSync": False, "current": {}}


def servers() -> dict[str, Any]:
    query = {"qryType": 1, "query": SERVERS, "refId": "PrometheusVariableQueryEditor-VariableQuery"}
    chosen = {"regex": "", "sort": 1, "hide": 0, "includeAll": True, "multi": True, "allValue": ".*", "options": []}
    current = {"selected": True, "text": ["All"], "value": ["$__all"]}
    named = {"name": "instance", "label": "Server", "type": "query", "datasource": SOURCE, "definition": SERVERS}
    return {**named, "query": query, **chosen, "refresh": 2, "skipUrlSync": False, "current": current}


def text() -> str:
    """Return the file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
