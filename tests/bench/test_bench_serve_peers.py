"""benchmarks/serve_peers.py with servers that load nothing: how it takes turns, and what it says of those that fail."""

import json
import os
import sys
from pathlib import Path

import pytest
from oracle import require
from sources import ROOT

FAKE = """
import os, sys, time
from dataclasses import replace
sys.path.insert(0, {tests!r})
from odd_server import OddServer, plain, well_behaved

def answer(request):
    if request.path == "/health":
        return plain(b"")
    with open({calls!r}, "a") as file:
        print({name!r}, request.path, request.body.decode(), file=file)
    {body}
    return well_behaved(request)

with OddServer(answer, port=int(sys.argv[1])):
    with open({pids!r}, "a") as file:
        print(os.getpid(), file=file)
    time.sleep(600)
"""
PROBE = {"read_gb_s": 10.0, "read_gb_s_median": 9.0, "gemm_tflops": 1.0, "peak_tflops": 2.0, "gemm_dtype": "float32"}


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import serve_peers

    monkeypatch.setattr(serve_peers, "SETTLE_S", 0.0)
    monkeypatch.setattr(serve_peers, "measure_limits", lambda: {"machine": {}, "probe": PROBE})
    return serve_peers


@pytest.fixture
def run(peers, tmp_path, monkeypatch, capsys):
    """Runs the driver with fakes in the place of both: (status, JSON, calls, standard output and error)."""
    calls, pids = tmp_path / "calls.txt", tmp_path / "pids.txt"

    def system(name, body):
        script = tmp_path / f"{name}.py"
        names = {"tests": str(Path(__file__).parent), "calls": str(calls), "pids": str(pids)}
        script.write_text(FAKE.format(name=name, body=body, **names))
        return peers.System(name, [sys.executable, str(script), "{port}"], {}, ("numpy",))

    def run_driver(*arguments, body="pass"):
        monkeypatch.setattr(peers, "ours", lambda options: system("ours", "pass"))
        monkeypatch.setattr(peers, "vllm", lambda options: system("vllm", body))
        path = tmp_path / "peers.json"
        small = ["--requests", "4", "--warmup", "1", "--output-tokens", "3", "--picture-size", "32x32"]
        monkeypatch.setattr(
            sys, "argv", ["serve_peers.py", str(tmp_path), "--vllm", "P", *small, "--json", str(path), *arguments]
        )
        status = peers.main()
        for pid in pids.read_text().split() if pids.exists() else ():
            assert not Path(f"/proc/{pid}").exists()  # nothing is left behind
        document = json.loads(path.read_text()) if path.exists() else None
        lines = [line.split(" ", 2) for line in calls.read_text().splitlines()] if calls.exists() else []
        return status, document, lines, capsys.readouterr()

    return run_driver


def test_both_get_the_same_requests_in_changing_order(run):
    status, document, calls, captured = run("--rounds", "2")
    assert status == 0, captured.err
    chats = {name: [c[2] for c in calls if c[0] == name and "chat" in c[1]] for name in ("ours", "vllm")}
    assert sorted(chats["ours"]) == sorted(chats["vllm"])
    assert len(set(chats["ours"])) == len(chats["ours"]) == 2 * (4 + 1)  # nothing twice: caches do not help
    order = [name for name, path, _ in calls if path == "/v1/models"]
    assert order == ["ours", "vllm", "vllm", "ours"]
    assert {(row["round"], row["system"]) for row in document["rows"]} == {
        (number, system) for number in (1, 2) for system in ("ours", "vllm")
    }
    assert [run["summary"]["num_answered"] for run in document["runs"]] == [4] * 4
    by_round = {(row["round"], row["system"]): row["figure"] for row in document["rows"] if row["work"] == "TTFT p95"}
    (entry,) = [e for e in document["summary"] if (e["work"], e["system"]) == ("TTFT p95", "vllm")]
    ratios = [by_round[number, "ours"] / by_round[number, "vllm"] for number in (1, 2)]
    assert (entry["ours_to_it"]["min"], entry["ours_to_it"]["max"]) == (min(ratios), max(ratios))
    assert document["systems"]["vllm"]["resident_bytes"] > 1 << 20 and document["systems"]["ours"]["versions"]["numpy"]
    assert "TTFT p50" in captured.out and "x speed" in captured.out and "read bandwidth: 10 GB/s" in captured.out


def test_one_alone(run, tmp_path):
    require("matplotlib")
    image = tmp_path / "peers.png"
    status, document, calls, _ = run("--rounds", "1", "--no-ours", "--plot", str(image))
    assert status == 0 and {call[0] for call in calls} == {"vllm"}
    assert all("ours_to_it" not in entry for entry in document["summary"])
    assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "body,message",
    [
        ("print('no tiles left', flush=True); os._exit(3)", "no tiles left"),
        ("if request.body: raise ConnectionError", "failures {'closed'"),
        (
            'if request.body: request = replace(request, body=b\'{"messages": [], "max_tokens": 1}\')',
            "4 answers were shorter",
        ),
    ],
)
def test_a_rival_that_fails_is_named_and_left_out(run, body, message):
    status, document, _, captured = run("--rounds", "1", body=body)
    assert status == 1 and message in captured.err and document["failures"]
    assert {row["system"] for row in document["rows"]} == {"ours"}


def test_a_server_that_does_not_start(run):
    status, document, _, captured = run("--rounds", "1", body="this is no Python")
    assert status == 1 and "vllm ended with status 1 before it was ready" in captured.err
    assert "SyntaxError" in captured.err and {row["system"] for row in document["rows"]} == {"ours"}


def test_other_work_is_refused(run):
    body = "return [p.replace(b'prompt_tokens\": 100', b'prompt_tokens\": 101') for p in well_behaved(request)]"
    status, _, _, captured = run("--rounds", "1", body=body)
    assert status == 2 and "the servers count different prompt tokens" in captured.err


def test_nothing_to_measure(peers, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve_peers.py", "folder", "--no-ours"])
    assert peers.main() == 2 and "nothing to measure" in capsys.readouterr().err


def test_vllms_command(peers):
    options = peers._parser().parse_args(
        [
            "folder",
            "--vllm",
            "PY",
            "--concurrency",
            "5",
            "--vllm-env",
            "VLLM_CPU_KVCACHE_SPACE=9",
            "--vllm-args",
            "--a b",
        ]
    )
    system = peers.vllm(options)
    assert system.command[0] == "PY" and system.command[-2:] == ["--a", "b"] and "{port}" in system.command
    assert system.command[system.command.index("--max-num-seqs") + 1] == "5"
    assert system.environment["VLLM_CPU_KVCACHE_SPACE"] == "9"
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert system.environment["VLLM_CPU_OMP_THREADS_BIND"] == cpus
    ours = peers.ours(options).command
    assert ours[1:] == ["-m", "tilewright", "serve", "folder", "--port", "{port}"]
