"""Installs the torch that constraints.txt pins, as its build for CPUs where PyTorch's own index can be reached.

    python tools/install_torch.py && pip install -c constraints.txt .

torch's wheels for Linux on pip's default index are built for CUDA and bring gigabytes that no CPU needs. PyTorch keeps
an index of CPU wheels, whose address uv knows (`--torch-backend cpu`). Where uv cannot be had, or that index does not
answer within ten seconds, this says so in one line and leaves torch to pip, so that a mirror or a folder of wheels that
pip is configured for still serves.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
# Whether the index answers is found out in this time; pip's own retries would take minutes.
ANSWER_SECONDS = 10.0
# Fetching uv, some 25 MB, is a download like any other; a network that takes longer for it is taken for none.
FETCH_SECONDS = 60.0


def pinned_version() -> str:
    """The version of torch in constraints.txt."""
    found = re.search(r"^torch==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{CONSTRAINTS} pins no torch: a line torch==VERSION is missing")
    return found[1]


def installed_version() -> str | None:
    """The version of torch in this environment, without the part that names its build, or None."""
    try:
        return metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def find_uv(folder: str) -> tuple[Path | None, str]:
    """uv from beside this Python, else from the PATH, else fetched by pip into `folder`; or None and the reason."""
    places = [str(Path(sys.executable).parent), *os.get_exec_path()]
    for place in places:
        if os.access(Path(place) / "uv", os.X_OK):
            return Path(place) / "uv", ""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-compile",
    ]
    reason = complaint([*pip, "--retries", "0", "--target", folder, "uv"], os.environ, FETCH_SECONDS)
    return (None, f"uv could not be fetched: {reason}") if reason else (Path(folder) / "bin" / "uv", "")


def complaint(command: list[str], environment: Mapping[str, str], limit_s: float | None) -> str:
    """Runs `command` without its output; an empty string when it succeeded, else the reason in one line."""
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return f"nothing within {limit_s:g} seconds"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return ""
    # Both pip and uv end with the innermost cause.
    lines = [line.strip(" ╰─▶├│×") for line in done.stderr.splitlines()]
    return next((line for line in reversed(lines) if line), f"exit status {done.returncode}")


def install_cpu_build(version: str, limit_s: float = ANSWER_SECONDS) -> str:
    """Installs torch of `version` from the index of CPU wheels; an empty string, or the reason why it could not."""
    with tempfile.TemporaryDirectory() as folder:
        uv, reason = find_uv(folder)
        if uv is None:
            return reason
        # What torch depends on is left to pip, which may be configured for a mirror that uv does not know.
        install = [str(uv), "pip", "install", "--python", sys.executable, "--torch-backend", "cpu", "--no-deps"]
        install.append(f"torch=={version}")
        # Without retries a name that does not resolve is told at once.
        asking = {**os.environ, "UV_HTTP_RETRIES": "0", "UV_HTTP_TIMEOUT": f"{max(1, limit_s):.0f}"}
        reason = complaint([*install, "--dry-run"], asking, limit_s)
        if reason:
            return f"PyTorch's index of CPU wheels does not answer: {reason}"
        # The download itself may take what it takes; uv shows its progress.
        return "" if subprocess.run(install).returncode == 0 else "the download of its CPU wheel failed"


def main() -> None:
    version = pinned_version()
    if installed_version() == version:
        return
    reason = install_cpu_build(version)
    if reason:
        warning = "On pip's default index it is built for CUDA and brings gigabytes."
        print(f"torch {version} is left to pip: {reason}. {warning}", file=sys.stderr)


if __name__ == "__main__":
    main()
