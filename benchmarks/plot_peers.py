"""Draws docs/images/peers_{light,dark}.svg from benchmarks/figures/peers.json: python benchmarks/plot_peers.py

A column of bars per workload, a row per engine; each column has its own scale, from 0 to its largest figure. The SVG is
written by hand: it is a few kilobytes, sharp at any size, and needs no plotting library. Two files, because an image on
a page follows the theme of the browser and not the one chosen on the page; README.md picks with <picture>.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "benchmarks" / "figures" / "peers.json"
IMAGES = ROOT / "docs" / "images"

WIDTH = 880
NAMES_WIDTH = 112
COLUMN_WIDTH = (WIDTH - NAMES_WIDTH) // 4
LABEL_WIDTH = 58  # right of the longest bar: "3.8-3.9" in 13 px
HEADER_HEIGHT = 70
ROW_HEIGHT = 30
BAR_HEIGHT = 18
CAPTION_LINE_HEIGHT = 17
FONT = "-apple-system, BlinkMacSystemFont, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Theme:
    """Colours; the background is the page's own."""

    text: str
    muted: str
    line: str
    bar: str
    own_bar: str


# Text has a contrast of at least 4.5 to GitHub's backgrounds, white and #0d1117; the accent is that of our own page.
THEMES = {
    "light": Theme(text="#1f2328", muted="#59636e", line="#d1d9e0", bar="#b4bcc6", own_bar="#2647b5"),
    "dark": Theme(text="#f0f6fc", muted="#9198a1", line="#3d444d", bar="#545d68", own_bar="#a3b6ff"),
}


def value_of(figure: str) -> float | None:
    """The length of a bar: the figure, or the middle of a range such as 3.8-3.9; None for a run that failed."""
    if figure == "failed":
        return None
    parts = [float(part) for part in figure.split("-")]
    return sum(parts) / len(parts)


def draw(document: Mapping[str, Any], theme: Theme) -> str:
    """The chart as the text of an SVG file."""
    engines, workloads = document["engines"], document["workloads"]
    rows_bottom = HEADER_HEIGHT + ROW_HEIGHT * len(engines)
    height = rows_bottom + 16 + CAPTION_LINE_HEIGHT * len(document["caption"])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="{FONT}" font-size="13">',
        f"<title>{escape(_title(document))}</title>",
        *_names(engines, theme),
    ]
    for index, workload in enumerate(workloads):
        parts += _column(NAMES_WIDTH + index * COLUMN_WIDTH, workload, engines, theme)
    for index, line in enumerate(document["caption"]):
        y = rows_bottom + 24 + CAPTION_LINE_HEIGHT * index
        parts.append(_text(0, y, line, theme.muted, size=12))
    return "\n".join([*parts, "</svg>", ""])


def _title(document: Mapping[str, Any]) -> str:
    """All figures in words, for screen readers."""
    columns = []
    for workload in document["workloads"]:
        figures = [f"{engine['engine']} {engine['figures'][workload['name']]}" for engine in document["engines"]]
        columns.append(f"{workload['description']}, {_unit(workload)}: {', '.join(figures)}")
    return ". ".join([document["model"], *columns]) + "."


def _unit(workload: Mapping[str, Any]) -> str:
    unit = "seconds" if workload["unit"] == "s" else workload["unit"]
    return f"{unit}, {'higher' if workload['higher_is_better'] else 'lower'} is better"


def _names(engines: Sequence[Mapping[str, Any]], theme: Theme) -> Iterator[str]:
    for row, engine in enumerate(engines):
        color = theme.text if row == 0 else theme.muted
        yield _text(NAMES_WIDTH - 12, _middle(row), engine["engine"], color, bold=row == 0, anchor="end")


def _column(x: int, workload: Mapping[str, Any], engines: Sequence[Mapping[str, Any]], theme: Theme) -> Iterator[str]:
    yield _text(x, 16, workload["title"], theme.text, size=15, bold=True)
    yield _text(x, 35, workload["detail"], theme.text)
    yield _text(x, 52, _unit(workload), theme.muted, size=12)
    figures = [engine["figures"][workload["name"]] for engine in engines]
    values = [value_of(figure) for figure in figures]
    scale = (COLUMN_WIDTH - LABEL_WIDTH) / max(value for value in values if value is not None)
    for row, (figure, value) in enumerate(zip(figures, values, strict=True)):
        length = 0.0 if value is None else value * scale
        if value is not None:
            yield _bar(x, row, length, theme.own_bar if row == 0 else theme.bar)
        color = theme.muted if value is None else theme.text
        yield _text(x + length + 7, _middle(row), figure, color, bold=row == 0)
    bottom = HEADER_HEIGHT + ROW_HEIGHT * len(engines)
    yield f'<path d="M{x} {HEADER_HEIGHT - 2}V{bottom}" stroke="{theme.line}"/>'


def _bar(x: float, row: int, length: float, color: str) -> str:
    """A bar with its right corners rounded: it starts flat at the axis."""
    top, radius = _middle(row) - BAR_HEIGHT / 2, 3
    side, rise = length - radius, BAR_HEIGHT - 2 * radius
    corner = f"a{radius} {radius} 0 0 1"
    outline = f"M{x} {top:g}h{side:.1f}{corner} {radius} {radius}v{rise}{corner} -{radius} {radius}h-{side:.1f}z"
    return f'<path d="{outline}" fill="{color}"/>'


def _middle(row: int) -> float:
    return HEADER_HEIGHT + ROW_HEIGHT * (row + 0.5) - 1


def _text(x: float, y: float, text: str, color: str, size: int = 13, bold: bool = False, anchor: str = "start") -> str:
    """Text whose middle lies at y, in a line of its own."""
    style = f' font-size="{size}"' if size != 13 else ""
    style += ' font-weight="600"' if bold else ""
    style += f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:g}" dy=".35em" fill="{color}"{style}>{escape(text, quote=False)}</text>'


def main() -> None:
    document = json.loads(FIGURES.read_text())
    for name, theme in THEMES.items():
        path = IMAGES / f"peers_{name}.svg"
        path.write_text(draw(document, theme))
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
