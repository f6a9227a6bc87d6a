"""tools/install_torch.py installs the CPU build where PyTorch's index answers and else says so, soon, in one line."""

import os
import time

import pytest
from sources import ROOT

from tools import install_torch

VERSION = install_torch.pinned_version()


@pytest.fixture
def uv(tmp_path, monkeypatch):
    """Puts a program named uv before all others, which writes a line for each of its calls into the file given back."""
    calls = tmp_path / "calls"

    def make(body: str):
        program = tmp_path / "uv"
        program.write_text(f'#!/bin/sh\necho "$UV_HTTP_RETRIES $*" >> {calls}\n{body}\n')
        program.chmod(0o755)
        monkeypatch.setattr(install_torch.sys, "executable", str(tmp_path / "python"))
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return calls

    return make


def test_an_index_that_answers_serves_the_cpu_build(uv):
    calls = uv("exit 0")
    assert install_torch.install_cpu_build(VERSION) == ""
    asked, installed = calls.read_text().splitlines()
    assert asked.startswith("0 pip install") and asked.endswith(
        f"--torch-backend cpu --no-deps torch=={VERSION} --dry-run"
    )
    assert installed.endswith(f"--torch-backend cpu --no-deps torch=={VERSION}")


def test_an_index_that_refuses_is_told_with_its_reason(uv):
    calls = uv("echo 'error: Request failed' >&2; echo '  ╰─▶ Connection refused' >&2; exit 2")
    assert install_torch.install_cpu_build(VERSION).endswith("does not answer: Connection refused")
    assert len(calls.read_text().splitlines()) == 1


def test_an_index_that_is_silent_is_given_up(uv):
    uv("exec sleep 60")
    begin = time.monotonic()
    assert install_torch.install_cpu_build(VERSION, limit_s=0.5).endswith("nothing within 0.5 seconds")
    assert time.monotonic() - begin < 30  # sleep would have gone on for sixty
    assert install_torch.ANSWER_SECONDS <= 10


def test_a_download_that_breaks_off_is_told(uv):
    uv('case "$*" in *--dry-run) exit 0;; *) exit 1;; esac')
    assert "failed" in install_torch.install_cpu_build(VERSION)


def test_without_uv_the_reason_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho 'ERROR: No matching distribution found for uv' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(install_torch.sys, "executable", str(failing))
    reason = install_torch.install_cpu_build(VERSION)
    assert reason == "uv could not be fetched: ERROR: No matching distribution found for uv"


def test_torch_that_is_there_is_kept(uv, monkeypatch, capsys):
    calls = uv("exit 1")
    monkeypatch.setattr(install_torch, "installed_version", lambda: VERSION)
    install_torch.main()
    assert not calls.exists()
    assert capsys.readouterr() == ("", "")


def test_the_fallback_is_one_line_and_no_failure(uv, monkeypatch, capsys):
    uv("echo 'Connection refused' >&2; exit 2")
    monkeypatch.setattr(install_torch, "installed_version", lambda: None)
    install_torch.main()  # does not raise: pip goes on
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.endswith("\n")
    assert VERSION in err and "Connection refused" in err and "CUDA" in err


def test_the_build_in_a_version_does_not_count(monkeypatch):
    monkeypatch.setattr(install_torch.metadata, "version", lambda name: f"{VERSION}+cpu")
    assert install_torch.installed_version() == VERSION


def before(text: str, first: str, second: str) -> bool:
    """Whether `first` stands in `text`, and `second` only after it."""
    return 0 <= text.find(first) < text.find(second)


def test_what_is_told_is_what_is_done():
    """README and docs give the two commands that the Makefile gives, in their order, and so does the image."""
    tool, package = "tools/install_torch.py", "pip install -c constraints.txt ."
    makefile = (ROOT / "Makefile").read_text()
    # Nothing before it asks for a package that needs torch.
    assert before(makefile, f"$(BIN)/python {tool}", "--requirement build/requirements.txt")
    assert "install --no-compile -c constraints.txt" in makefile
    for page in ("README.md", "docs/install.md", "docs/deploy.md"):
        assert before((ROOT / page).read_text(), f"python {tool}", package), page
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    assert before(dockerfile, f"RUN python {tool}", "pip wheel")
    install = (ROOT / "docs/install.md").read_text()
    assert f"within {install_torch.ANSWER_SECONDS:.0f} seconds" in install
    assert "--torch-backend cpu" in install
