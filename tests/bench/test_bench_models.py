import json
from dataclasses import asdict

import pytest
import torch
from oracle import require
from tiny_checkpoint import write_cross_model, write_experts_model, write_text_model, write_vision_model

from tilewright import Engine, cli
from tilewright.bench import models, timing
from tilewright.bench.rounds import Measurement, Prompts, Round, costs
from tilewright.engine.measure import machine

FIGURES = {
    "decode": {"decode", "read", "read, of read_gb_s", "read per token", "first token"},
    "prefill": {"prefill", "linears", "linears, of gemm_tflops", "with attention"},
    "picture": {"first token", "preprocess", "vision", "prefill", "prompt"},
    "batch": {"all answers", "tokens", "again", "again, tokens", "again, cached"},
}
SMALL = {
    "decode": ["--prompt-tokens", "20", "--new-tokens", "6"],
    "prefill": ["--prompt-tokens", "100"],
    "picture": ["--size", "48x32"],
    "batch": ["--size", "32x32", "--batch", "3", "--prompt-tokens", "70", "--new-tokens", "4"],
}


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory):
    return str(write_vision_model(tmp_path_factory.mktemp("vision")))


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    return str(write_text_model(tmp_path_factory.mktemp("text")))


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command without waiting for the machine's probes: (exit status, standard output, standard error)."""
    monkeypatch.setattr(timing, "probe", lambda: timing.Probe(20.0, 18.0, 1.5, 2.0, "float32"))
    monkeypatch.setattr(machine, "measure", lambda: machine.MeasuredMachine(20.0, 19.0, 11.0, 2.0, 4.0, 0.1))

    def run_command(*arguments):
        status = cli.main(["bench", *arguments, "--no-pack-cache", "--max-context", "512"])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_command


@pytest.mark.parametrize("what", list(FIGURES))
def test_every_benchmark_has_its_figures(what, run, vision_model, tmp_path):
    path = tmp_path / "b.json"
    status, text, _ = run(what, "-m", vision_model, "--rounds", "2", "--json", str(path), *SMALL[what])
    assert status == 0 and "read 20.0 GB/s" in text and "matrix product 1.50 TFLOP/s (float32)" in text
    document = json.loads(path.read_text())
    assert set(document["figures"]) == FIGURES[what]
    assert len(document["rounds"]) == 2 and document["bench"] == what
    for name, figure in document["figures"].items():
        assert name in text and figure["min"] <= figure["median"] <= figure["max"]
    assert document["limits"] == asdict(timing.probe())
    assert document["machine"]["measured"]["bf16_tflops"] == 2.0
    assert document["settings"]["speculate"] == 0 and document["costs"]["weight_bytes_per_step"] > 0


def test_the_second_time_is_cached_and_the_first_is_not(run, vision_model, tmp_path):
    path = tmp_path / "b.json"
    assert run("batch", "-m", vision_model, "--rounds", "2", "--json", str(path), *SMALL["batch"])[0] == 0
    cached = json.loads(path.read_text())["figures"]["again, cached"]
    assert cached["min"] == cached["max"] == 3 * 64  # one page of 64 tokens of each of three prompts
    with Engine(vision_model, pack_cache=False, max_context=512) as engine:
        prompts = Prompts(engine)
        for number in range(2):
            answers = prompts.answers([prompts.ids(130, number)], 1)
            assert answers[0].num_cached_tokens == 0


def test_text_models(run, text_model):
    assert run("batch", "-m", text_model, "--rounds", "1", *SMALL["batch"])[0] == 0
    status, _, errors = run("picture", "-m", text_model, "--rounds", "1")
    assert status == 2 and "accepts text only" in errors


def test_plot(run, text_model, tmp_path):
    require("matplotlib")
    path = tmp_path / "b.png"
    assert run("decode", "-m", text_model, "--rounds", "2", "--plot", str(path), *SMALL["decode"])[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_users_errors(run, text_model, capsys):
    status, _, errors = run("decode", "-m", text_model, "--new-tokens", "1")
    assert status == 2 and "--new-tokens is 1" in errors
    assert run("decode", "-m", "./nothing/here/now")[0] == 2
    with pytest.raises(SystemExit):
        run("picture", "-m", text_model, "--size", "large")
    assert "expected one such as 1024x768" in capsys.readouterr().err


def test_costs_by_hand(tmp_path, text_model):
    """Sizes of a tied dense model, and of one with experts and a head of its own, from their configs."""
    width, inner, vocabulary, head = 96, 160, 272, 32
    attention = (4 + 2 * 2) * head * width + width * 4 * head
    with Engine(text_model, dtype="float32", pack_cache=False, max_context=512) as engine:
        dense = costs(engine)
    assert dense.linear_flops_per_token == 2 * 3 * (attention + 3 * inner * width)
    assert dense.head_flops == 2 * vocabulary * width
    assert dense.attention_flops(10) == 3 * 55 * 4 * 4 * head
    weights = 4 * (3 * (attention + 3 * inner * width) + vocabulary * width)
    assert weights <= dense.weight_bytes_per_step < 1.25 * weights  # padded to whole tiles
    with Engine(write_experts_model(tmp_path), dtype="float32", pack_cache=False, max_context=512) as engine:
        sparse = costs(engine)
    experts = 8 * width + 3 * 3 * 48 * width  # the router, and three matrices of three experts
    assert sparse.linear_flops_per_token == 2 * (3 * attention + 3 * inner * width + 2 * experts)


def test_a_model_that_looks_at_images(run, tmp_path):
    folder = str(write_cross_model(tmp_path))
    for what in ("picture", "batch", "decode"):
        assert run(what, "-m", folder, "--rounds", "1", *SMALL[what])[0] == 0
    with Engine(folder, dtype="float32", pack_cache=False, max_context=512) as engine:
        counted = costs(engine)
    query, key_value, mlp = 96 * 96, 2 * 48 * 96, 3 * 160 * 96
    assert counted.linear_flops_per_token == 2 * 3 * (2 * query + key_value + mlp)  # what text alone goes through
    looking = 4 * 2 * (2 * query + mlp)  # keys and values are of the image
    assert looking <= counted.cross_bytes_per_step < 1.25 * looking
    assert counted.cross_linear_flops_per_token == 2 * 2 * (2 * query + mlp)
    assert counted.cross_flops_per_pair == 2 * 4 * 96
    states = 34 * 2 * 2 * 48 * 4  # two tiles of 17, two layers, keys and values of two heads of 24
    assert (
        states <= counted.cross_attention_bytes(34) - counted.cross_bytes_per_step < 1.4 * states
    )  # padded to whole tiles
    assert counted.cross_attention_bytes(0) == 0 and counted.decode_bytes(9, 34) > counted.decode_bytes(9)


def test_shares_are_of_the_probe_between():
    before, after = timing.Probe(10.0, 9.0, 1.0, 2.0, "float32"), timing.Probe(30.0, 9.0, 2.0, 2.0, "float32")
    between = timing.between(before, after)
    assert between == timing.Probe(20.0, 9.0, 1.5, 2.0, "float32")
    assert timing.median([before, after, after]) == after
    made = Round.of({"read": Measurement(10.0, "GB/s", "read_gb_s"), "first token": Measurement(1.0, "s")}, between)
    assert made.amounts["read, of read_gb_s"] == Measurement(50.0, "%")
    assert set(made.amounts) == {"read", "read, of read_gb_s", "first token"}


def test_probe(monkeypatch):
    monkeypatch.setattr(timing, "GEMM_SHAPE", (64, 64, 64))
    monkeypatch.setattr(machine, "measure", lambda seconds: machine.MeasuredMachine(20.0, 19.0, 11.0, 2.0, 4.0, 0.1))
    taken = timing.probe()
    assert (
        taken.read_gb_s == 20.0
        and taken.read_gb_s_median == 19.0
        and taken.peak_tflops == 2.0
        and 0 < taken.gemm_tflops < 10
    )
    assert torch.is_inference_mode_enabled() is False


def test_commands_are_described():
    assert set(models.WHAT) == set(models.DEFAULTS) == set(FIGURES)
