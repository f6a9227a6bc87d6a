"""The manners of every command: output cut short, Ctrl-C, typing errors, models and files that are not there."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tilewright import Diffusion, Engine, cli
from tilewright.cli import streams as standard_streams
from tilewright.host.files import CheckpointError
from tilewright.weights import embedded, hub

COMMANDS = ("demo", "chat", "image", "video", "serve", "batch", "cache", "info", "bench", "eval")
PROGRAM = [sys.executable, "-m", "tilewright"]


def program(*arguments, closed=None, **streams):
    """The exit status of a command and what it printed; `closed`: a standard stream that it finds closed."""
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    given["env"] = {**os.environ, "TILEWRIGHT_CACHE_DIR": "off", **given.get("env", {})}
    before = None if closed is None else (lambda: os.close(closed))
    return subprocess.run([*PROGRAM, *arguments], timeout=120, preexec_fn=before, text=True, **given)


@pytest.fixture(scope="module")
def left_pipe():
    """A pipe whose reader has left."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@pytest.mark.parametrize("arguments", [["cache"], ["serve", "--help"]], ids=" ".join)
def test_a_reader_that_leaves_ends_a_command_quietly(arguments, left_pipe):
    done = program(*arguments, stdout=left_pipe)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("is_unbuffered", [False, True])
@pytest.mark.parametrize("arguments", [["cache"], ["--help"]], ids=" ".join)
def test_a_full_device_is_a_line(arguments, is_unbuffered):
    with open("/dev/full", "w") as full:
        unbuffered = {"PYTHONUNBUFFERED": "1"} if is_unbuffered else {}
        done = program(*arguments, stdout=full, env=unbuffered)
    assert done.returncode == 1
    assert done.stderr == "tilewright: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("arguments", [["cache"], ["--help"]], ids=" ".join)
def test_closed_output_is_a_line(arguments):
    done = program(*arguments, closed=1)
    assert done.returncode == 1
    assert done.stderr == "tilewright: standard output cannot be written: Bad file descriptor\n"


def test_messages_that_cannot_be_written_stop_nothing():
    with open("/dev/full", "w") as full:
        done = program("image", "a cat", "-m", "./nowhere", stderr=full)
    assert (done.returncode, done.stdout) == (2, "")
    done = program("cache", closed=2)
    assert done.returncode == 0 and "TILEWRIGHT_CACHE_DIR is off" in done.stdout


def test_closed_input_is_an_empty_prompt():
    done = program("chat", closed=0)
    assert (done.returncode, done.stderr) == (2, "tilewright: the prompt is empty, expected some text\n")


def test_streams_are_given_back(capsys):
    before = sys.stdin, sys.stdout, sys.stderr
    assert cli.main(["info", "./nowhere"]) == 2
    assert (sys.stdin, sys.stdout, sys.stderr) == before


def test_control_c_shows_no_traceback():
    command = subprocess.Popen([*PROGRAM, "info", "--measure", "--seconds", "60"], stderr=subprocess.PIPE, text=True)
    while "_kernels" not in Path(f"/proc/{command.pid}/maps").read_text():
        assert command.poll() is None
        time.sleep(0.02)
    command.send_signal(signal.SIGINT)
    assert command.communicate(timeout=60)[1] == ""
    # Within a module that calls exec, Python ends by the signal itself, of which shells say 130 too.
    assert command.returncode in (130, -signal.SIGINT)


def test_control_c_while_modules_load():
    script = """
import sys
from tilewright import cli
class Interrupted:
    def find_spec(name, *others):
        if name == "tilewright.types":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted)
sys.exit(cli.main(["info"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


def usage_error(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


@pytest.mark.parametrize(
    ("line", "command", "words"),
    [
        ("serve --prot 9000", "serve", "no flag --prot; did you mean --port?"),
        ("serve --prot=9000", "serve", "no flag --prot; did you mean --port?"),
        ("chat Hello --temprature 0", "chat", "no flag --temprature; did you mean --temperature?"),
        ("bench decode --round 3 --promt-tokens 9", "bench decode", "did you mean --prompt-tokens?"),
        ("batch --modle m", "batch", "no flag --modle; did you mean --model?"),
        ("--vresion", "", "no flag --vresion; did you mean --version?"),
        ("chat Hello --xyzzy", "chat", "no flag --xyzzy"),
        ("serv --port 9000", "", "did you mean serve?"),
        ("bench deocde", "bench", "did you mean decode?"),
        ("chat Hello --dtype bfloat", "chat", "did you mean bfloat16?"),
        ("cache verfy", "cache", "did you mean verify?"),
        ("chat What is it", "chat", "unexpected argument 'is': a text with spaces needs quotes"),
        ("serve ./one -m ./other", "serve", "two models are named, ./one and ./other"),
        ("serve -m ./other ./one", "serve", "two models are named, ./other and ./one"),
    ],
)
def test_a_typing_error_names_the_nearest_and_the_command(line, command, words, capsys):
    text = usage_error(line.split(), capsys)
    program = f"tilewright {command}".rstrip()
    assert text.startswith(f"usage: {program} [OPTION ...]") and words in text
    assert text.endswith(f"All options: {program} --help\n") and text.count("\n") <= 4


def test_a_text_may_look_like_a_flag():
    options = cli._parser().parse_args(["chat", "-m", "model", "--system=--brief", "--", "--what"])
    assert (options.prompt, options.system) == ("--what", "--brief")


@pytest.mark.parametrize("arguments", [["serve", "./one"], ["serve", "-m", "./one"], ["info", "--model", "./one"]])
def test_every_command_takes_its_model_as_m(arguments):
    assert cli._parser().parse_args(arguments).model == "./one"


def test_of_several_m_the_last_counts():
    assert cli._parser().parse_args(["chat", "-m", "./one", "-m", "./other"]).model == "./other"


ABSENT = [
    "./nowhere",
    "../nowhere",
    "~/nowhere",
    "/nowhere/at/all",
    "nowhere",
    "some/deep/folder",
    "model.gguf",
    "org/model.gguf",
    "models/nowhere",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "Qwen3-VL-2B").mkdir(parents=True)
    monkeypatch.setattr(hub, "_download", lambda *arguments: pytest.fail("the hub was asked"))
    return tmp_path


@pytest.mark.parametrize("model", ABSENT)
def test_a_path_that_is_not_there_is_no_hub_id(model, folder):
    with pytest.raises(CheckpointError, match=f"^{model} does not exist"):
        hub.find(model)


def test_hub_ids_and_paths_that_are_there(folder):
    assert hub.find("Qwen/Qwen3-VL-2B-Instruct") is None
    assert hub.find("models/Qwen3-VL-2B") == Path("models/Qwen3-VL-2B")
    assert hub.find(embedded.MODEL_NAME) == embedded.path()


def test_what_was_downloaded_is_found_beside_a_folder_of_that_name(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    (folder / "hub" / "models--models--nowhere").mkdir(parents=True)
    assert hub.find("models/nowhere") is None


@pytest.mark.parametrize(
    ("model", "nearest"),
    [("models/Qwen3-VL-2", "models/Qwen3-VL-2B"), ("model", "models"), ("tilewright-tiny-v", "tilewright-tiny-vl")],
)
def test_the_nearest_model_is_named(model, nearest, folder):
    with pytest.raises(CheckpointError, match=rf"\(did you mean {nearest}\?\)"):
        hub.find(model)


NEED_A_MODEL = [
    ["serve", "./nowhere"],
    ["serve", "-m", "./nowhere"],
    ["serve", "--image-model", "./nowhere"],
    ["chat", "Hello", "-m", "./nowhere"],
    ["demo", "-m", "./nowhere"],
    ["image", "a cat", "-m", "./nowhere"],
    ["video", "a cat", "-m", "./nowhere"],
    ["batch", "in.jsonl", "out.jsonl", "-m", "./nowhere"],
    ["info", "./nowhere"],
    ["info", "--load", "-m", "./nowhere"],
    ["bench", "decode", "-m", "./nowhere"],
    ["bench", "image", "-m", "./nowhere"],
    ["eval", "--text", "book.txt", "-m", "./nowhere"],
]
NEED_A_FILE = [
    ["chat", "Hello", "--image", "./nowhere"],
    ["chat", "Hello", "--video", "./nowhere"],
    ["chat", "Hello", "--audio", "./nowhere"],
    ["chat", "Hello", "--mmproj", "./nowhere"],
    ["image", "a cat", "--image", "./nowhere"],
    ["video", "a cat", "--image", "./nowhere"],
]


def test_what_is_not_there_is_known_before_torch_is_imported():
    """One process runs all the commands: torch would be there for all after the first that imports it."""
    script = """
import sys
from tilewright import cli
for arguments in {commands}:
    status = cli.main(arguments)
    print(status, "torch" in sys.modules, arguments)
"""
    commands = [*NEED_A_MODEL, *NEED_A_FILE]
    done = subprocess.run(
        [sys.executable, "-c", script.format(commands=commands)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == [f"2 False {arguments}" for arguments in commands]
    lines = done.stderr.splitlines()
    assert len(lines) == len(commands) and all(line.startswith("tilewright: ") for line in lines), done.stderr
    assert all("./nowhere does not exist" in line for line in lines[: len(NEED_A_MODEL)])
    assert all("nowhere: there is no such file" in line for line in lines[len(NEED_A_MODEL) :])


@pytest.mark.parametrize("make", [Engine, Diffusion])
def test_from_python_too(make, folder):
    with pytest.raises(CheckpointError, match="models/nowhere does not exist"):
        make("models/nowhere")


def test_a_hub_out_of_reach_is_one_line():
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": "/nowhere"}
    done = program("serve", "somebody/something", "--port", "0", env=nowhere)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "tilewright: somebody/something is not on this machine, and the hub cannot be reached"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("data", [b"\xff", b"a\xff"])
def test_a_prompt_that_is_no_text(data):
    done = subprocess.run([*PROGRAM, "chat"], input=data, capture_output=True, timeout=60)
    assert done.returncode == 2 and b"standard input is not UTF-8" in done.stderr


def test_output_errors_pass_where_files_are_handled():
    assert not issubclass(standard_streams.OutputError, OSError)
