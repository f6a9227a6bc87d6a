import dataclasses
import json
import os
import platform
import re
import subprocess
import sys

import pytest

from tilewright import __version__, cli, config
from tilewright.engine.measure import machine
from tilewright.ops import native
from tilewright.ops.native import kernels

LEVELS = config.ISA_LEVELS[platform.machine()]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tilewright", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def test_json_tells_the_machine_and_every_op(capsys):
    assert cli.main(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["version"] == __version__
    assert told["isa_found"] == kernels.isa_levels()
    assert told["backends"] == ["native", "torch"]
    assert set(told["kernels"]) == set(kernels.manifest())
    assert told["num_threads"] == kernels.num_threads()
    assert told["memory_bytes"] >= told["memory_available_bytes"] > 0
    assert told["num_cpus"] >= told["num_cores"] >= told["num_sockets"] >= 1


def test_text_tells_the_kernel_of_every_op(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    for op, kernel in machine.chosen_kernels().items():
        assert any(line.split() == ["op", op, kernel.name] for line in text.splitlines())


@pytest.mark.parametrize("level", kernels.isa_levels())
def test_a_kernel_is_the_best_the_level_allows(level):
    kernels.set_max_isa(level)
    try:
        for op, kernel in machine.chosen_kernels().items():
            allowed = LEVELS[: LEVELS.index(level) + 1]
            assert kernel.name == next(name for isa, name in kernels.manifest()[op] if isa in allowed)
    finally:
        kernels.set_max_isa(config.current().max_isa)


def test_a_build_for_one_cpu_says_so_and_what_that_costs_on_another():
    assert f"compiled {native.read_build()}" in re.sub(" +", " ", machine.as_text(machine.describe()))
    levels = ("amx", "avx512_bf16", "scalar")
    here = native.Build(levels, LEVELS, LEVELS)
    assert not here.is_for_another_cpu
    assert str(here).startswith("amx, avx512_bf16, scalar alone, for the CPU it was built on (`pip install .`")
    elsewhere = native.Build(levels, ("scalar", "avx2", "avx512"), LEVELS)
    assert elsewhere.is_for_another_cpu and "this one has no amx, and ops without a kernel for it" in str(elsewhere)
    whole = native.Build(LEVELS, ("scalar",), LEVELS)
    assert not whole.is_for_another_cpu and str(whole) == "every ISA level"


def test_the_cap_is_shown():
    result = run("info", TILEWRIGHT_MAX_ISA="scalar")
    assert "in use: scalar, capped at scalar by TILEWRIGHT_MAX_ISA" in result.stdout
    assert "norm_scalar" in result.stdout


def test_a_wrong_setting_is_one_line_and_status_2():
    result = run("info", TILEWRIGHT_MAX_ISA="sse9")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        f"tilewright: TILEWRIGHT_MAX_ISA is 'sse9', expected one of {', '.join(LEVELS)}"
    ]


def test_measured_figures_are_positive_and_in_the_json(capsys):
    assert cli.main(["info", "--measure", "--seconds", "0.05", "--json"]) == 0
    measured = machine.MeasuredMachine(**json.loads(capsys.readouterr().out)["measured"])
    assert all(value > 0 for value in dataclasses.astuple(measured))
    assert measured.read_gb_s >= measured.read_gb_s_median


def test_version_and_help(capsys):
    for arguments in (["--version"], ["--help"], ["info", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            cli.main(arguments)
    out = capsys.readouterr().out
    assert f"tilewright {__version__}" in out
    assert "examples:" in out


@pytest.mark.parametrize(
    "size_bytes,text",
    [(0, "0 B"), (1023, "1023 B"), (48 << 10, "48 KiB"), (314572800, "300 MiB"), (3 << 29, "1.5 GiB")],
)
def test_sizes_are_told_in_the_largest_unit(size_bytes, text):
    assert machine._size(size_bytes) == text


@pytest.fixture
def arm_virtual_machine(tmp_path, monkeypatch):
    """A system as some virtual machines on ARM show it: a cache without a size, no topology, no memory nodes."""
    index = tmp_path / "cpu/cpu0/cache/index0"
    index.mkdir(parents=True)
    (index / "level").write_text("1\n")
    (index / "type").write_text("Data\n")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n")
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine, "SYSTEM", tmp_path)
    monkeypatch.setattr(machine, "HUGE_PAGES", tmp_path / "enabled")


def test_what_the_system_does_not_tell_is_unknown(arm_virtual_machine):
    told = machine.describe()
    assert (told.cpu_model, told.caches, told.numa_nodes) == ("Arm Neoverse-N1", [], [])
    assert (told.num_sockets, told.num_cores) == (1, os.cpu_count())
    lines = dict(line.split(maxsplit=1) for line in machine.as_text(told).splitlines())
    assert lines["CPU"] == "Arm Neoverse-N1"
    assert (lines["caches"], lines["NUMA"]) == ("unknown", "one node")
    assert lines["huge"].split() == ["pages", "unknown"]


def test_ranks_of_several_nodes_are_shown(tmp_path, monkeypatch):
    cpus = config.from_environment().available_cpus
    if len(cpus) < 2:
        pytest.skip("one CPU")
    for node, cpu in enumerate(cpus[:2]):
        folder = tmp_path / f"node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpu}\n")
        (folder / "meminfo").write_text(f"Node {node} MemTotal: 1024 kB\n")
    monkeypatch.setattr(machine, "SYSTEM", tmp_path)
    told = machine.describe()
    assert [(rank.cpus, rank.memory_nodes) for rank in told.node_binding] == [((cpus[0],), (0,)), ((cpus[1],), (1,))]
    rows = [line.split(maxsplit=2) for line in machine.as_text(told).splitlines() if line.startswith("--tp 2")]
    assert [text for _, _, text in rows] == [str(rank) for rank in told.node_binding]
    assert [rank["rank"] for rank in machine.as_dict(told)["node_binding"]] == [0, 1]


def test_a_cpu_that_is_told_nowhere_is_unknown(arm_virtual_machine, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    assert machine.describe().cpu_model == "unknown"


def test_memory_of_a_loaded_model_is_told(capsys):
    """Of the model that comes with the package."""
    assert cli.main(["info", "--load", "--kv-memory", "8MB", "--quantize", "int8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert 0 < told["weight_bytes"] < told["resident_bytes"]
    assert 0 < told["kv_bytes_touched"] < told["kv_bytes"] <= 8_000_000
    assert cli.main(["info", "--load", "--kv-memory", "8MB", "--quantize", "int8"]) == 0
    assert "int8_rotated" in (text := capsys.readouterr().out) and "resident in all" in text
    assert cli.main(["info", "--load", "--quantize", "int3"]) == 2
    assert "int3" in capsys.readouterr().err


@pytest.mark.parametrize("given", [("--quantize", "int4"), ("--kv-memory", "8MB")])
def test_what_says_how_a_model_is_loaded_needs_loading(given, capsys):
    assert cli.main(["info", *given]) == 2
    assert "give --load too" in capsys.readouterr().err
