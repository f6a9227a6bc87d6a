import json
import math

import pytest
import torch
from oracle import require

from tilewright import cli
from tilewright.bench import report, rows, timing
from tilewright.bench.row import Calls, Row, close, rotation
from tilewright.bench.timing import Times
from tilewright.engine.measure import machine


def row(name: str, agrees: bool = True, group: str = "") -> Row:
    x = torch.ones(64)
    return Row(name, "64", 512, 64, lambda: Calls(lambda _: x + x, lambda _: x * 2, lambda: agrees), group)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command over the given rows: (exit status, standard output)."""
    measured = machine.MeasuredMachine(10.0, 9.0, 5.0, 1.0, 2.0, 0.1)
    monkeypatch.setattr(machine, "measure", lambda: measured)

    def run_command(made, *arguments):
        monkeypatch.setattr(rows, "all_rows", lambda: iter(made))
        status = cli.main(["bench", "kernels", "--rounds", "3", *arguments])
        return status, capsys.readouterr().out

    return run_command


def test_a_row_has_its_figures(run, tmp_path):
    path = tmp_path / "k.json"
    status, text = run([row("add", group="sums"), row("other", group="sums")], "--json", str(path))
    assert status == 0 and "add" in text and "sums:" in text and "read 10.0 GB/s" in text
    document = json.loads(path.read_text())
    assert [r["name"] for r in document["rows"]] == ["add", "other"]
    assert document["rows"][0]["times"]["ours_s"] > 0 and document["rows"][0]["limit_s"] == pytest.approx(512 / 10e9)
    assert document["machine"]["measured"]["bf16_tflops"] == 1.0
    assert document["geometric_means"][0]["num_rows"] == 2
    assert {"tilewright", "torch", "python"} <= set(document["versions"])


def test_no_figure_for_a_kernel_that_disagrees(run, tmp_path):
    path = tmp_path / "k.json"
    status, text = run([row("good"), row("bad", agrees=False)], "--json", str(path))
    assert status == 1
    (line,) = [line for line in text.splitlines() if line.startswith("bad")]
    assert line.split() == ["bad", "64", "FAILED", "CHECK"]
    assert json.loads(path.read_text())["rows"][1]["times"] is None


def test_filter(run):
    made = [row("linear"), row("norm")]
    status, text = run(made, "--filter", "norm 64")
    assert status == 0 and "linear" not in text
    assert run(made, "--filter", "nothing")[0] == 2


def test_plot(run, tmp_path):
    require("matplotlib")
    path = tmp_path / "k.png"
    assert run([row("add"), row("bad", agrees=False)], "--plot", str(path))[0] == 1
    assert path.read_bytes().startswith(b"\x89PNG")


def test_both_sides_are_timed_in_turns():
    seen = []
    calls = Calls(lambda i: seen.append(("ours", i)), lambda i: seen.append(("torch", i)), lambda: True)
    times = timing.interleaved(calls, 4)
    assert 0 < times.ours_least_s <= times.ours_s and 0 < times.torch_least_s <= times.torch_s
    for side in ("ours", "torch"):
        numbers = [i for name, i in seen if name == side]
        assert numbers == list(range(len(numbers)))  # each side walks its own rotation


def test_geometric_means():
    results = [report.BenchResult("a", "", "g", 1, 1, 1.0, Times(1.0, ratio, 1.0, ratio)) for ratio in (2.0, 8.0)]
    (mean,) = report.means([*results, report.BenchResult("failed", "", "g", 1, 1, 1.0, None)])
    assert mean.num_rows == 2 and math.isclose(mean.speedup, 4.0)


def test_rotation_leaves_cache():
    tensor = torch.zeros(1 << 26)
    copies = rotation(tensor)
    assert copies[0][0] is tensor and len(copies) == 6


def test_close_sees_nan_and_wrong_numbers():
    x = torch.linspace(-1, 1, 50)
    assert close(x.bfloat16(), x)
    assert not close(torch.where(x > 0.9, float("nan"), x), x)
    assert not close(x + 0.1, x)


def test_every_row_is_named_once():
    names = [(r.name, r.shape) for r in rows.all_rows()]
    assert len(names) == len(set(names)) and all(r.bytes_moved > 0 for r in rows.all_rows())
