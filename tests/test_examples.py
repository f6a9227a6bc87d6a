"""The examples of the pages and of --help that need no other model than the embedded ones run, and end well."""

import json
import os
import re
import subprocess

import pytest
from examples import CLIENTS, command_words, commands_of, help_texts, parse, python_blocks
from PIL import Image
from serve_process import ServerProcess
from sources import ROOT

from tilewright import Diffusion, Engine, cli
from tilewright.bench import timing
from tilewright.engine.measure import machine
from tilewright.weights import embedded

PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.name != CLIENTS  # server/test_client_pages.py runs its examples
]
SOURCES = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES} | help_texts()
URL = "http://127.0.0.1:8000"

# What makes an example small; the flags that it has are taken as they are.
SMALLER = {
    "chat": ["--max-tokens", "8"],
    "demo": ["--max-tokens", "8"],
    "info": ["--seconds", "0.1"],
    "bench decode": ["--rounds", "1", "--prompt-tokens", "16", "--new-tokens", "4"],
    "bench prefill": ["--rounds", "1", "--prompt-tokens", "16"],
    "bench picture": ["--rounds", "1", "--size", "64x64"],
    "bench batch": ["--rounds", "1", "--batch", "2", "--new-tokens", "4", "--size", "64x64"],
    "bench serve": ["--requests", "2", "--warmup", "0", "--output-tokens", "4", "--no-limits"],
}
# Images of a size that the embedded model makes, sounds that it does not hear, and others' servers: not run.
NOT_RUN = ("bench kernels", "bench serve --audio", "bench serve --images", "bench serve --make-videos")


def is_run(line):
    """Whether the embedded models are enough for a command that ends by itself and asks nobody else."""
    options = parse(line)
    is_named = getattr(options, "model", None) is not None
    is_elsewhere = re.search(r"https?://|--device|--replicas|--pictures \./", line)
    return not (is_named or is_elsewhere or line.startswith(("serve", "eval", *NOT_RUN)))


RUN = {source: lines for source, text in SOURCES.items() if (lines := list(filter(is_run, commands_of(text))))}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with files that readers have of their own."""
    monkeypatch.chdir(tmp_path)
    Image.open(embedded.demo_file("demo.png")).convert("RGB").save("photo.jpg")
    (tmp_path / "speech.wav").write_bytes(embedded.demo_file("demo.wav").read_bytes())
    body = {"messages": [{"role": "user", "content": "What is a tile?"}], "max_tokens": 4}
    request = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "questions.jsonl").write_text(json.dumps(request) + "\n")
    return tmp_path


@pytest.fixture(scope="module")
def server():
    """`tilewright serve`, with the models that look and draw."""
    process = ServerProcess(None)
    yield process
    process.end()


def test_enough_is_run():
    assert sum(map(len, RUN.values())) > 25
    assert {"README.md", "docs/embedded.md", "tilewright chat --help", "tilewright bench decode --help"} <= RUN.keys()


@pytest.fixture
def quick_probe(monkeypatch):
    """What is measured beside the model is small: it is not what these tests are about."""
    monkeypatch.setattr(timing, "GEMM_SHAPE", (64, 64, 64))
    monkeypatch.setattr(timing, "SECONDS", 0.02)
    monkeypatch.setattr(machine, "available_bytes", lambda: 64 << 20)


_DONE = set()  # examples without files are run once, wherever else they are


@pytest.mark.parametrize("source", RUN)
def test_the_commands_run(source, folder, server, quick_probe, capfd):
    for line in RUN[source]:
        if line in _DONE:
            continue
        words = command_words(line)
        kind = " ".join(words[: 2 if words[0] == "bench" else 1])
        smaller = SMALLER.get(kind, [])
        if kind == "bench serve":
            words.insert(2, server.url)
            smaller = smaller if "--rate" in words else [*smaller, "--concurrency", "2"]
        assert cli.main([*words, *smaller]) == 0, f"{line}: {capfd.readouterr().err}"
        printed = capfd.readouterr()
        assert printed.out or printed.err
        if not {"--image", "--audio", "--speak", "-o", "--output"} & set(words):
            _DONE.add(line)


PYTHON = {
    f"{page.relative_to(ROOT)} {number}": code
    for page in PAGES
    for number, code in enumerate(python_blocks(page), 1)
    if not re.search("cuda|FLUX", code)
}


@pytest.mark.parametrize("where", PYTHON)
def test_the_python_runs(where, folder, capfd):
    code = PYTHON[where].replace("width=1024, height=768", "width=256, height=256")
    models = {"Z-Image": "tiny_draw", "Qwen3-Omni": "tiny_omni"}
    for path in set(re.findall(r'"(\./[\w.-]+)"', code)):
        key = next((key for start, key in models.items() if start in path), "tiny_vl")
        code = code.replace(path, str(embedded.path(key)))
    namespace = {"__name__": "example"}
    try:
        exec(compile(code, where, "exec"), namespace)
    finally:
        for value in namespace.values():
            if isinstance(value, Engine | Diffusion):
                value.close()


SHELL = {
    f"{page.relative_to(ROOT)} {number}": code
    for page in PAGES
    for number, code in enumerate(re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL), 1)
}


@pytest.mark.parametrize("where", SHELL)
def test_the_requests_are_answered(where, folder, server):
    code = SHELL[where].replace(URL, server.url)
    (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\nmax-time = 60\n")
    shell = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(shell, env={**os.environ, "CURL_HOME": str(folder)}, capture_output=True, timeout=90)
    assert done.returncode == 0 and done.stdout, done.stderr + done.stdout
