"""What deploy/ says holds here: files it names exist, nothing runs as root, variables are ones we read."""

import json
import re
import shutil
import subprocess

import pytest
from sources import ROOT

from tilewright import cli, config
from tilewright.cli import serve

DEPLOY = ROOT / "deploy"
KNOWN_VARIABLES = set(re.findall(r"^[A-Z_]+(?= )", config.__doc__, re.MULTILINE))


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, arguments) of each line, continued ones joined."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def last_stage() -> list[tuple[str, str]]:
    instructions = dockerfile()
    begins = [place for place, (name, _) in enumerate(instructions) if name == "FROM"]
    assert len(begins) == 2  # one builds, one runs
    return instructions[begins[-1] :]


def only(instructions: list[tuple[str, str]], name: str) -> str:
    (arguments,) = (rest for instruction, rest in instructions if instruction == name)
    return arguments


def settings() -> dict[str, list[str]]:
    """Of the service: every key's values in order."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "tilewright.service").read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def assignments(*texts: str) -> dict[str, str]:
    return dict(re.findall(r"([A-Z_]+)=(\S*)", " ".join(texts)))


def test_the_image_is_made_of_files_that_are_there():
    kept = (ROOT / ".dockerignore").read_text().split()
    copied = [rest.split()[:-1] for name, rest in dockerfile() if name == "COPY" and not rest.startswith("--from")]
    sources = {source for line in copied for source in line}
    assert sources and all((ROOT / source).exists() for source in sources)
    assert {f"!{source}" for source in sources} == {line for line in kept if line.startswith("!")}
    assert "torch==" in (ROOT / "constraints.txt").read_text()


def test_the_image_runs_without_root():
    stage = last_stage()
    user, group = only(stage, "USER").split(":")
    assert int(user) >= 1000 and int(group) >= 1000
    names = [name for name, _ in stage]
    assert all(name not in ("RUN", "COPY", "ADD") for name in names[names.index("USER") :])


def test_the_image_runs_the_server():
    stage = last_stage()
    assert json.loads(only(stage, "ENTRYPOINT")) == ["tilewright"]
    assert json.loads(only(stage, "CMD")) == ["serve", "--host", "0.0.0.0"]
    check = json.loads(only(stage, "HEALTHCHECK").partition("CMD ")[2])
    assert f"http://127.0.0.1:{only(stage, 'EXPOSE')}/health" in check[-1]
    compile(check[-1], "HEALTHCHECK", "exec")


def test_the_image_keeps_its_caches():
    stage = last_stage()
    variables = assignments(only(stage, "ENV"))
    volume = only(stage, "VOLUME")
    assert variables["TILEWRIGHT_CACHE_DIR"].startswith(f"{volume}/") and variables["HF_HOME"].startswith(f"{volume}/")
    assert any(name == "RUN" and rest.endswith(volume) and "--owner 10001" in rest for name, rest in stage)
    assert {name for name in variables if name.startswith("TILEWRIGHT_")} <= KNOWN_VARIABLES


def test_the_service_runs_without_root_and_may_write_its_cache_alone():
    service = settings()
    for key, value in {
        "DynamicUser": "yes",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "CapabilityBoundingSet": "",
        "SystemCallArchitectures": "native",  # whatever that is
        "CacheDirectory": "tilewright",
        "KillSignal": "SIGTERM",
        "Restart": "on-failure",
    }.items():
        assert service[key] == [value], key
    # torch's oneDNN makes code as it runs; memory and CPUs are read from /proc.
    assert not service.keys() & {"User", "ReadWritePaths", "MemoryDenyWriteExecute", "ProcSubset", "PrivateNetwork"}


def test_the_service_knows_its_variables():
    service = settings()
    (command,) = service["ExecStart"]
    assert command.split()[:2] == ["/opt/tilewright/bin/tilewright", "serve"]
    given = assignments(*service["Environment"])
    assert {name for name in given if name.startswith("TILEWRIGHT_")} <= KNOWN_VARIABLES
    example = (DEPLOY / "environment.example").read_text()
    set_there = set(re.findall(r"^([A-Z_]+)=", example, re.MULTILINE))
    offered = set(re.findall(r"^#?([A-Z_]+)=", example, re.MULTILINE))
    used = set(re.findall(r"\$\{?([A-Z_]+)", command))
    assert used == {"HOST", "PORT", "FLAGS", "MODEL"} and used <= given.keys() | set_there and used <= offered


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_understands_the_service(tmp_path):
    text = (DEPLOY / "tilewright.service").read_text()
    copy = tmp_path / "tilewright.service"
    copy.write_text(text.replace("/opt/tilewright/bin/tilewright", "/bin/true"))  # it looks for the program
    result = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and str(copy) not in result.stderr and "tilewright.service:" not in result.stderr


@pytest.mark.parametrize("page", ["deploy.md", "benchmarks.md"])
def test_the_pages_name_files_that_are_there(page):
    text = (ROOT / "docs" / page).read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links and all((ROOT / "docs" / link).exists() for link in links)
    assert all((ROOT / path).exists() for path in re.findall(r"\b(?:deploy|benchmarks)/[\w.]+\w", text))


def test_what_the_files_ask_of_the_server_is_there(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    told = capsys.readouterr().out
    for flag in ("--host", "--port", "--allowed-host", "--kv-memory", "MODEL"):
        assert flag in told
    assert config.resolve({"TILEWRIGHT_API_KEY": "one, two"}, [0]).api_keys == ("one", "two")


def test_the_service_waits_for_a_drained_end():
    stop_s = {"min": 60, "s": 1}
    number, unit = re.fullmatch(r"(\d+)(min|s)", settings()["TimeoutStopSec"][0]).groups()
    assert int(number) * stop_s[unit] > serve.DRAIN_S
