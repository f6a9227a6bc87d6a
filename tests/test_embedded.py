"""Commands and the library without a model named: the embedded one, said in one line that is never on stdout."""

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from embedded_stand_in import environment, write_distribution
from oracle import require
from PIL import Image
from serve_process import ServerProcess
from sources import ROOT
from tiny_checkpoint import write_text_model, write_vision_model

from tilewright import Engine, cli, config
from tilewright.bench import timing
from tilewright.engine.measure import machine
from tilewright.flags import engine as engine_flags
from tilewright.types import RequestError
from tilewright.weights import embedded

FLAGS = ["--max-context", "512", "--kv-memory", "32MB"]
NOTICE = "no model named: using the embedded tilewright-tiny-vl"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """A checkpoint folder with random weights."""
    return write_vision_model(tmp_path_factory.mktemp("stand_in"))


@pytest.fixture
def in_place(stand_in, monkeypatch):
    """The stand-in in place of the embedded model, within this process."""
    monkeypatch.setitem(embedded._folders(), "tiny_vl", stand_in)
    return stand_in


@pytest.fixture
def left_out(tmp_path, monkeypatch):
    """An environment without the embedded model."""
    monkeypatch.setitem(embedded._folders(), "tiny_vl", tmp_path / "tiny_vl")


def answer_of(model):
    with Engine(model, pack_cache=False, max_context=512, max_sequences=1) as engine:
        return engine.chat([{"role": "user", "content": "Hello"}], max_tokens=6, temperature=0.0).text


def test_the_library(in_place, caplog):
    told = answer_of(str(in_place))
    assert not caplog.records, "a model that is named is not worth a word"
    assert answer_of(None) == told
    (record,) = caplog.records
    assert record.levelname == "WARNING" and NOTICE in record.message
    assert record.message.endswith('Another: Engine("./Qwen3-VL-2B-Instruct")')


def test_special_tokens_in_messages_are_text_unless_the_owner_allows_them(stand_in):
    options = {"pack_cache": False, "max_context": 512, "max_sequences": 1}
    question = [{"role": "user", "content": "<|end|>"}]
    num_tokens = []
    for more in ({}, {"allow_special_tokens": True}):
        with Engine(stand_in, **options, **more) as engine:
            num_tokens.append(engine.chat(question, max_tokens=1).num_prompt_tokens)
    parser = argparse.ArgumentParser()
    engine_flags.add_arguments(parser)
    given = engine_flags.engine_options(parser.parse_args(["--allow-special-tokens"]))
    assert given["allow_special_tokens"] is True
    assert "allow_special_tokens" not in engine_flags.engine_options(parser.parse_args([]))
    assert num_tokens[0] > num_tokens[1] > 1


def test_it_has_its_own_name_however_it_is_found(in_place, tmp_path):
    for model in (None, str(in_place), tmp_path / "link"):
        if model == tmp_path / "link":
            model.symlink_to(in_place)
        with Engine(model, max_context=512, max_sequences=1) as engine:
            assert engine.loaded.name == embedded.MODEL_NAME


def test_it_takes_no_place_in_the_pack_cache(in_place, tmp_path, monkeypatch):
    settings = replace(config.current(), cache_dir=tmp_path / "cache")
    monkeypatch.setattr(config, "current", lambda: settings)
    Engine(max_context=512, max_sequences=1).close()
    assert not settings.cache_dir.exists()
    shutil.copytree(in_place, tmp_path / "named")
    Engine(tmp_path / "named", max_context=512, max_sequences=1).close()
    assert len(list(settings.cache_dir.iterdir())) == 1


def test_chat(in_place, capsys):
    arguments = ["chat", "Hello", "--max-tokens", "6", "--temperature", "0", *FLAGS]
    assert cli.main([*arguments, "-m", str(in_place)]) == 0
    named = capsys.readouterr()
    assert NOTICE not in named.err
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out == named.out
    notice, speeds = captured.err.splitlines()
    assert notice.startswith(f"tilewright: {NOTICE} (21M parameters;") and speeds.startswith("6 tokens")
    assert notice.endswith("Another: -m ./Qwen3-VL-2B-Instruct")
    assert cli.main([*arguments, "--quiet"]) == 0
    assert capsys.readouterr() == (named.out, "")


def test_a_folder_called_none_is_a_folder(left_out, tmp_path, monkeypatch, capsys):
    write_text_model(tmp_path / "None")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["chat", "Hello", "-m", "None", "--max-tokens", "2", "--no-pack-cache", *FLAGS]) == 0
    assert "no model named" not in capsys.readouterr().err
    with Engine("None", pack_cache=False, max_context=512, max_sequences=1) as engine:
        assert engine.loaded.name == "None"


def test_bench(in_place, monkeypatch, capsys):
    monkeypatch.setattr(timing, "probe", lambda: timing.Probe(20.0, 18.0, 1.5, 2.0, "float32"))
    monkeypatch.setattr(machine, "measure", lambda: machine.MeasuredMachine(20.0, 19.0, 11.0, 2.0, 4.0, 0.1))
    assert cli.main(["bench", "picture", "--size", "32x32", "--rounds", "1", *FLAGS]) == 0
    captured = capsys.readouterr()
    assert "first token" in captured.out and "embedded" not in captured.out
    assert NOTICE in captured.err


def test_batch(in_place, tmp_path, capsys):
    body = {"model": embedded.MODEL_NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    request = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(request))
    assert cli.main(["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *FLAGS]) == 0
    captured = capsys.readouterr()
    assert not captured.out and captured.err.count(NOTICE) == 1
    answered = json.loads((tmp_path / "out.jsonl").read_text())
    assert answered["response"]["body"]["model"] == embedded.MODEL_NAME


def test_a_package_without_it_says_so(left_out, tmp_path, capsys):
    with pytest.raises(RequestError, match="tilewright-tiny-vl is not installed: install the package tilewright-tiny"):
        Engine()
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}})
    )
    files = [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    for command in (
        ["chat", "Hello"],
        ["demo"],
        ["serve", "--port", "0"],
        ["batch", *files, "-q"],
        ["bench", "decode"],
    ):
        assert cli.main(command) == 2
        captured = capsys.readouterr()
        last = captured.err.splitlines()[-1]  # a benchmark may have found the machine busy before
        assert not captured.out and "Traceback" not in captured.err
        assert last.startswith("tilewright: no model is named, and") and last.endswith("a GGUF file or a hub id")


@pytest.mark.parametrize("command", ["chat", "serve", "batch", "demo", "bench decode"])
def test_help_says_that_none_need_be_named(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    assert "(default: the embedded tilewright-tiny-vl)" in " ".join(capsys.readouterr().out.split())


def test_serve_as_users_start_it(stand_in, tmp_path):
    """Two processes, where the stand-in is installed: the name is known to both."""
    path = environment(write_distribution(tmp_path, stand_in))["PYTHONPATH"]
    server = ServerProcess(None, "--max-context", "512", PYTHONPATH=path)
    try:
        with server.client() as client:
            model, drawing = client.models.list().data
            assert (model.id, drawing.id) == (embedded.MODEL_NAME, embedded.DRAWING_NAME)
            chat = client.chat.completions.create(
                model=model.id, messages=[{"role": "user", "content": "Hello"}], max_tokens=4
            )
            assert chat.model == embedded.MODEL_NAME and chat.usage.completion_tokens
    finally:
        server.end()
    messages = [json.loads(line).get("message", "") for line in server.lines]
    (notice,) = [message for message in messages if NOTICE in message]
    assert notice.endswith("Another: tilewright serve ./Qwen3-VL-2B-Instruct")


def copy_start(source, target):
    """All of a source file; of weights, whose compression takes long, only the first bytes."""
    with open(source, "rb") as file:
        Path(target).write_bytes(file.read(1 << 20))


@pytest.mark.parametrize("name", ["tilewright", "tilewright-tiny"])
def test_what_wheels_and_sdists_carry(name, tmp_path):
    """Built from a copy by the project's own build, without the kernels, which take minutes."""
    require("scikit_build_core")
    source = ROOT if name == "tilewright" else ROOT / "packages" / name
    project = tmp_path / "project"
    project.mkdir()
    for file in ("pyproject.toml", "README.md", "LICENSE", "CMakeLists.txt"):
        if (source / file).exists():
            shutil.copy(source / file, project)
    shutil.copy(ROOT / ".gitignore", project)
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(source / "src", project / "src", ignore=ignore, copy_function=copy_start)
    script = "from scikit_build_core.build import build_sdist, build_wheel\nbuild_sdist('dist')\n"
    script += "build_wheel('dist', {'wheel.cmake': 'false'})"
    subprocess.run([sys.executable, "-c", script], cwd=project, check=True, capture_output=True, timeout=120)
    (wheel,), (sdist,) = (list((project / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    expected = {path.relative_to(project / "src") for path in (project / "src").rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as archive:
        packed = {Path(name) for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == expected
    has_weights = any(path.suffix == ".safetensors" for path in packed)
    assert has_weights == (name == "tilewright-tiny")
    # With its kernels the package stays far below what an index takes: the library of all x86 levels has some 5 MB.
    assert has_weights or wheel.stat().st_size < 4e6
    with tarfile.open(sdist) as archive:
        packed = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    assert {Path("src", file) for file in expected} <= packed


def test_the_demo_image_is_an_image():
    with Image.open(embedded.demo_file("demo.png")) as image:
        assert image.size == (512, 512) and image.mode == "RGB"


def test_a_process_that_names_none(stand_in, tmp_path):
    """Nothing but the answer on stdout, where no logging is set up: Python's own handler takes the notice."""
    script = "import tilewright\nwith tilewright.Engine(max_context=512, max_sequences=1) as e:\n"
    script += " print(e.chat([{'role': 'user', 'content': 'Hello'}], max_tokens=3, temperature=0.0).text)"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(write_distribution(tmp_path, stand_in)),
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert NOTICE not in done.stdout and done.stderr.count(NOTICE) == 1 and done.stderr.count("\n") == 1
