"""What peers.py and serve_peers.py measured, in numbers, as a table and as an image."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from tilewright.bench.report import aligned, save_figure

DECODE_CONTEXT = 128 + 32  # tokens W1's step attends to, on average


def summary(rows: Sequence[Mapping], works: Mapping[str, Mapping], costs: Mapping[str, int]) -> list[dict]:
    """For each workload and system: the figure, ours in relation to it, and the share of the machine's limit.

    A ratio is ours / theirs of one round: for rates more is better, for times less.
    """
    found = []
    for name in works:
        of_work = [row for row in rows if row["work"] == name]
        ours = {row["round"]: row["figure"] for row in of_work if row["system"] == "ours"}
        for system in dict.fromkeys(["ours", *(row["system"] for row in of_work)]):
            own = [row for row in of_work if row["system"] == system]
            if not own:
                continue
            entry = {"work": name, "system": system, "figure": _spread([row["figure"] for row in own])}
            ratios = [ours[row["round"]] / row["figure"] for row in own if row["round"] in ours]
            if system != "ours" and ratios:
                entry["ours_to_it"] = _spread(ratios)
            shares = [_share(name, row, costs) for row in own]
            if not any(math.isnan(share) for share in shares):
                entry["of_limit"] = _spread(shares)
            found.append(entry)
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def _share(work: str, row: Mapping, costs: Mapping[str, int]) -> float:
    """W1: of the read bandwidth. W2: of torch's matrix product, counting the linears alone. All of that moment."""
    probes = row["probe"]["before"], row["probe"]["after"]
    if work == "W1":
        own = DECODE_CONTEXT * costs["kv_bytes_per_token"] + costs["state_bytes_per_sequence"]
        step_bytes = costs["weight_bytes_per_step"] + own
        return row["figure"] * step_bytes / statistics.mean(probe["read_gb_s"] * 1e9 for probe in probes)
    if work in ("W2", "W2l"):
        flops = row["prompt_tokens"] * costs["linear_flops_per_token"] + costs["head_flops"]
        return flops / row["all_s"] / statistics.mean(probe["gemm_tflops"] * 1e12 for probe in probes)
    return math.nan


def as_table(document: Mapping) -> str:
    """The summary for people to read, and how the machine was meanwhile."""
    works = document["works"]
    lines = [("work", "system", "median", "min - max", "unit", "ours to it", "min - max", "of limit")]
    for entry in document["summary"]:
        work = works[entry["work"]]
        figure, ratio, share = entry["figure"], entry.get("ours_to_it"), entry.get("of_limit")
        kind = "x speed" if work["is_rate"] else "x time"
        lines.append(
            (
                entry["work"],
                entry["system"],
                f"{figure['median']:.4g}",
                f"{figure['min']:.4g} - {figure['max']:.4g}",
                work["unit"],
                f"{ratio['median']:.2f} {kind}" if ratio else "",
                f"{ratio['min']:.2f} - {ratio['max']:.2f}" if ratio else "",
                f"{share['median']:.0%}" if share else "",
            )
        )
    text = aligned(lines, left=range(len(lines[0])))
    text += ["", *(f"{name}: {work['title']}" for name, work in works.items())]
    text.append("")
    if any("of_limit" in entry for entry in document["summary"]):
        text.append(
            "of limit: W1 of the read bandwidth, W2 of torch's matrix product, as probed in turns with the work"
        )
    probes = [row["probe"][side] for row in document["rows"] for side in ("before", "after")]
    types = " and ".join(dict.fromkeys(probe["gemm_dtype"] for probe in probes))
    for key, unit, what in (
        ("read_gb_s", "GB/s", "read bandwidth"),
        ("read_gb_s_median", "GB/s", "its median over each probe"),
        ("gemm_tflops", "TFLOP/s", f"torch {types} 2048x4096x4096"),
        ("peak_tflops", "TFLOP/s", "bf16 multiply peak"),
    ):
        values = [probe[key] for probe in probes]
        text.append(f"{what}: {statistics.median(values):.3g} {unit} ({min(values):.3g} - {max(values):.3g})")
    for name, system in document["systems"].items():
        memory = f"{system['resident_bytes'] / 2**30:.1f} GiB resident after a call, at most"
        versions = ", ".join(f"{package} {version}" for package, version in system["versions"].items())
        computed_in = f"; computes in {system['dtype']}" if "dtype" in system else ""
        text.append(f"{name}: {versions}{computed_in}; loaded in {system['load_s']:.1f} s; {memory}")
    return "\n".join(text)


def write_plot(path: Path, document: Mapping) -> None:
    """A panel for each workload, a bar for each system: the median, and from the least to the most."""
    from matplotlib.figure import Figure

    works = document["works"]
    systems = list(document["systems"])
    figure = Figure(figsize=(3.2 * len(works), 4.2), layout="constrained")
    for axes, (name, work) in zip(figure.subplots(1, len(works), squeeze=False)[0], works.items(), strict=True):
        entries = [entry for entry in document["summary"] if entry["work"] == name]
        for entry in entries:
            spread = entry["figure"]
            place = systems.index(entry["system"])
            errors = [[spread["median"] - spread["min"]], [spread["max"] - spread["median"]]]
            bars = axes.bar(place, spread["median"], yerr=errors, capsize=4, color=f"C{place}")
            axes.bar_label(bars, labels=[f"{spread['median']:.4g}"], padding=3)
        axes.set_xticks(range(len(systems)), systems, rotation=20)
        better = "more" if work["is_rate"] else "less"
        axes.set(title=f"{name}: {work['title']}".replace(", ", ",\n"), ylabel=f"{work['unit']} ({better} is better)")
        axes.title.set_fontsize(9)
        axes.grid(True, axis="y", alpha=0.3)
    figure.suptitle(document["model"])
    save_figure(path, figure)
