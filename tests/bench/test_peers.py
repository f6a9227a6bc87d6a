"""benchmarks/peers.py with workers that load nothing: how it takes turns, and what it says of workers that fail."""

import json
import sys

import pytest
from sources import ROOT
from tiny_checkpoint import write_cross_model, write_text_model

BENCHMARKS = ROOT / "benchmarks"
FAKE = """
import sys, time
sys.path.insert(0, {workers!r})
from worker import System, serve, take_stdout

class Fake(System):
    name, keeps_prefixes = {name!r}, {keeps!r}
    def __init__(self, checkpoint): pass
    def versions(self): return {{"fake": "1"}}
    def details(self):
        costs = dict(weight_bytes_per_step=10**6, kv_bytes_per_token=0, state_bytes_per_sequence=10**5)
        costs |= dict(linear_flops_per_token=10**6, head_flops=0)
        return {{"costs": costs, "machine": {{}}}}
    def generate(self, prompts, images, new_tokens):
        print("noise on standard output")
        {body}
        with open({calls!r}, "a") as file:
            print({name!r}, len(prompts), prompts[0][:3], images and images[0].size, new_tokens, file=file)
        time.sleep(0.002 * new_tokens)
        return len(prompts[0])
    def probe(self):
        return dict(read_gb_s=10.0, read_gb_s_median=9.0, gemm_tflops=1.0, peak_tflops=2.0, gemm_dtype="float32")

serve(Fake, sys.argv[1], take_stdout())
"""


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import peers

    monkeypatch.setattr(peers, "SETTLE_S", 0.0)
    return peers


@pytest.fixture
def checkpoint(tmp_path):
    config = {"vocab_size": 1000, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def run(peers, checkpoint, tmp_path, monkeypatch, capsys):
    """Runs the driver with fakes in the place of all systems: (status, JSON, calls, standard output and error)."""
    calls = tmp_path / "calls.txt"

    def command(name, keeps=False, body="pass"):
        script = tmp_path / f"{name}.py"
        workers = str(BENCHMARKS / "peer_workers")
        script.write_text(FAKE.format(workers=workers, name=name, keeps=keeps, body=body, calls=str(calls)))
        return name, [sys.executable, str(script), str(checkpoint)]

    def run_driver(*arguments, body="pass", keeps=False):
        commands = [command("ours", keeps=True), command("rival", keeps=keeps, body=body)]
        monkeypatch.setattr(peers, "_commands", lambda options: commands)
        path = tmp_path / "peers.json"
        monkeypatch.setattr(sys, "argv", ["peers.py", str(checkpoint), "--json", str(path), *arguments])
        status = peers.main()
        document = json.loads(path.read_text()) if path.exists() else None
        return status, document, calls.read_text().splitlines() if calls.exists() else [], capsys.readouterr()

    return run_driver


def test_all_do_the_same_work(run):
    status, document, calls, captured = run("--works", "W1,W2", "--rounds", "2")
    assert status == 0, captured.err
    assert {(row["round"], row["work"], row["system"]) for row in document["rows"]} == {
        (number, work, system) for number in (1, 2) for work in ("W1", "W2") for system in ("ours", "rival")
    }
    prompts: dict[str, list[str]] = {"ours": [], "rival": []}
    for line in calls:
        name, _, rest = line.partition(" ")
        prompts[name].append(rest)
    assert prompts["ours"] == prompts["rival"]  # the same work in the same order
    assert len(set(prompts["ours"])) == len(prompts["ours"])  # nothing twice: caches do not help
    (ratio,) = [e["ours_to_it"] for e in document["summary"] if e["work"] == "W1" and e["system"] == "rival"]
    assert ratio["count"] == 2 and ratio["min"] <= ratio["median"] <= ratio["max"]
    assert "W1" in captured.out and "read bandwidth: 10 GB/s" in captured.out
    assert "torch float32 2048x4096x4096: 1 TFLOP/s" in captured.out


def test_turns_change(run):
    _, _, calls, _ = run("--works", "W2", "--rounds", "2")
    warming, first, second = ["rival", "ours"], ["ours", "rival"], ["rival", "ours"]
    assert [line.split()[0] for line in calls] == warming + first + second


def test_shares_by_hand(run):
    _, document, _, _ = run("--works", "W1,W2,W2l", "--rounds", "1")
    by_work = {(row["work"], row["system"]): row for row in document["rows"]}
    shares = {(e["work"], e["system"]): e["of_limit"]["median"] for e in document["summary"]}
    assert shares["W1", "rival"] == pytest.approx(by_work["W1", "rival"]["figure"] * 1.1e6 / 10e9)
    for work, num_tokens in (("W2", 1024), ("W2l", 2048)):
        assert shares[work, "ours"] == pytest.approx(num_tokens * 1e6 / by_work[work, "ours"]["all_s"] / 1e12)


@pytest.mark.parametrize("keeps", [False, True])
def test_the_same_again(run, keeps):
    status, document, calls, _ = run("--works", "W4,W4c", "--rounds", "1", keeps=keeps)
    assert status == 0
    figures = {(row["work"], row["system"]): row["figure"] for row in document["rows"]}
    measured = [line for line in calls if line.endswith(" 32")]
    assert [line.count("ours") for line in measured].count(1) == 2
    assert len({line for line in measured if line.startswith("ours")}) == 1  # the very same prompts and images
    if keeps:
        assert len(measured) == 4
    else:
        assert len(measured) == 3 and figures["W4c", "rival"] == figures["W4", "rival"]


def test_a_rival_that_dies_is_named_and_left_out(run):
    body = "sys.stderr.write('out of tiles'); sys.stderr.flush(); __import__('os')._exit(3)"
    status, document, _, captured = run("--works", "W2", "--rounds", "1", body=body)
    assert status == 1
    assert "rival has died with status 3" in captured.err and "out of tiles" in captured.err
    assert {row["system"] for row in document["rows"]} == {"ours"}
    assert document["failures"]


def test_an_error_is_passed_on_with_its_trace(run):
    status, _, _, captured = run("--works", "W2", "--rounds", "1", body="raise ValueError('too many tiles')")
    assert status == 1
    assert "rival could not do" in captured.err and "ValueError: too many tiles" in captured.err


def test_a_worker_that_hangs(run):
    status, _, _, captured = run("--works", "W2", "--rounds", "1", "--timeout", "3", body="time.sleep(100)")
    assert status == 1 and "rival took more than 3 s" in captured.err


def test_works_that_do_not_fit(run, checkpoint):
    status, _, _, captured = run("--works", "W4c", "--rounds", "1")
    assert status == 2 and "ask for both" in captured.err
    (checkpoint / "config.json").write_text('{"vocab_size": 1000}')
    status, _, _, captured = run("--works", "W3", "--rounds", "1")
    assert status == 2 and "needs a model that sees" in captured.err


def test_a_python_that_is_not_there(peers, checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(peers, "_commands", lambda options: [("ours", ["/nowhere/python"])])
    monkeypatch.setattr(sys, "argv", ["peers.py", str(checkpoint)])
    assert peers.main() == 2
    assert "ours cannot be started as /nowhere/python" in capsys.readouterr().err


def test_questions_about_texts_for_real(peers, tmp_path, monkeypatch, capsys):
    """Ours on a tiny checkpoint; the probe, which takes seconds, is left to the fakes."""
    folder = write_text_model(tmp_path / "model")
    monkeypatch.setattr(peers.Session, "run_round", _calls_only)
    options = ["--works", "W4t", "--rounds", "1", "--engine", "pack_cache=false"]
    monkeypatch.setattr(sys, "argv", ["peers.py", str(folder), *options])
    assert peers.main() == 0, capsys.readouterr().err
    assert "W4t" in capsys.readouterr().out


def test_questions_about_images_for_real(peers, tmp_path, monkeypatch, capsys):
    """Ours and transformers on a checkpoint that looks at images; transformers in the type that is asked for."""
    folder, path = write_cross_model(tmp_path), tmp_path / "peers.json"
    monkeypatch.setattr(peers.Session, "run_round", _calls_only)
    options = ["--transformers", sys.executable, "--transformers-dtype", "float32", "--works", "W1p,W3,W3q"]
    options += ["--side", "24", "--rounds", "1"]
    options += ["--engine", "pack_cache=false", "--engine", "kv_memory=20MB", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["peers.py", str(folder), *options])
    assert peers.main() == 0, capsys.readouterr().err
    table, document = capsys.readouterr().out, json.loads(path.read_text())
    assert "decode beside a 24x24 image" in table and "first token, 24x24 image" in table
    assert {(row["work"], row["system"]) for row in document["rows"]} == {
        (work, system) for work in ("W1p", "W3", "W3q") for system in ("ours", "transformers")
    }
    assert document["systems"]["ours"]["dtype"] == "bfloat16"
    assert document["systems"]["transformers"]["dtype"] == "float32" and "; computes in float32; " in table
    for row in document["rows"]:
        assert row["figure"] > 0 and row.get("prompt_tokens", 17) == 17
        if row["work"] == "W1p":
            assert 0 < row["first_s"] < row["all_s"]
        if row["work"] == "W3q":
            assert row["share_of_first"] == row["figure"] / row["first_s"]


def test_a_worker_that_does_not_tell_its_first_token(run):
    status, _, _, captured = run("--works", "W1p", "--rounds", "1")
    assert status == 2 and "does not tell when the first token came" in captured.err


def _calls_only(self, number, works, full):
    probe = {"read_gb_s": 10.0, "read_gb_s_median": 9.0, "gemm_tflops": 1.0, "peak_tflops": 2.0}
    probe["gemm_dtype"] = "bfloat16"
    for work in works:
        rows = [self._run(work, worker, number, full) for worker in self.workers]
        if full:
            self.rows += [{"round": number, **row, "probe": {"before": probe, "after": probe}} for row in rows]
