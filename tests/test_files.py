"""What stands where a file should be: nothing is waited for, nothing without an end is read, and an error is a line."""

import json
import os
import resource
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
from checkpoint_files import write_qwen3_vl_folder
from PIL import Image
from tiny_checkpoint import write_text_model

from tilewright import cli
from tilewright.batch import results
from tilewright.batch.results import ResultFile
from tilewright.bench import report
from tilewright.diffusion.expected import FILE, PastTimes
from tilewright.host import files
from tilewright.host.files import CheckpointError
from tilewright.inputs.media import MediaLimits, MediaPart, read_source
from tilewright.inputs.tokenizer import Tokenizer
from tilewright.types import RequestError
from tilewright.weights.checkpoint import open_checkpoint
from tilewright.weights.gguf.file import MAX_ARRAY, MAX_HEADER_BYTES, GgufFile

SPARSE_BYTES = 10 << 30


def pipe(path):
    os.mkfifo(path)


def directory(path):
    path.mkdir()


def endless(path):
    path.symlink_to("/dev/zero")


def full(path):
    path.symlink_to("/dev/full")


def sparse(path):
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


NOT_FILES = {
    pipe: "it is a pipe, expected a regular file",
    directory: "it is a directory, expected a regular file",
    endless: "it is a character device, expected a regular file",
    full: "it is a character device, expected a regular file",
}
ALL = [*NOT_FILES, sparse]


@pytest.fixture(autouse=True)
def bounded():
    """What waits, or reads without an end, fails after 20 s or 3 GiB instead of taking the machine."""

    def give_up(*_):
        raise TimeoutError("it did not return")

    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    # Mapping a sparse file takes addresses, and no memory.
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + SPARSE_BYTES + (3 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    signal.alarm(0)


def put(make, path):
    """Puts what `make` makes where a file was."""
    path.unlink(missing_ok=True)
    make(path)
    return path


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    return write_qwen3_vl_folder(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    return write_text_model(tmp_path_factory.mktemp("text") / "text")


def copied(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "model"))


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("tokenizer.json", 256 << 20),
        ("tokenizer_config.json", 64 << 20),
        ("generation_config.json", 64 << 20),
        ("special_tokens_map.json", 64 << 20),
        ("chat_template.json", 64 << 20),
        ("chat_template.jinja", 4 << 20),
        ("additional_chat_templates/more.jinja", 4 << 20),
    ],
)
def test_files_of_a_tokenizer(qwen_folder, tmp_path, name, limit, make):
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "tokenizer.json").symlink_to(qwen_folder / "tokenizer.json")
    put(make, tmp_path / name)
    expected = NOT_FILES.get(make, f"it has {SPARSE_BYTES} bytes, the limit is {limit}")
    with pytest.raises(CheckpointError, match=f"/{name} cannot be read: {expected}$"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("tokenizer", ["Qwen2Tokenizer", "CLIPTokenizer"])
@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_files_that_a_library_reads(tmp_path, tokenizer, name, make):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer}))
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").touch()
    put(make, tmp_path / name)
    expected = NOT_FILES.get(make, f"it has {SPARSE_BYTES} bytes, the limit is {256 << 20}")
    with pytest.raises(CheckpointError, match=f"/{name} cannot be read: {expected}$"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_files_of_a_checkpoint(text_folder, tmp_path, name, make):
    folder = copied(text_folder, tmp_path)
    put(make, folder / name)
    expected = NOT_FILES.get(make, f"it has {SPARSE_BYTES} bytes, the limit is {64 << 20}")
    if (name, make) == ("model.safetensors", sparse):  # of any size, and its header has a limit
        expected = "Expecting value"
    with pytest.raises(CheckpointError, match=f"/{name} .*{expected}"):
        open_checkpoint(folder)


@pytest.mark.parametrize("make", [pipe, endless, full, sparse])  # a folder may have this name
def test_gguf(tmp_path, make):
    with pytest.raises(CheckpointError, match=NOT_FILES.get(make, "is no GGUF file: it begins with")):
        open_checkpoint(put(make, tmp_path / "model.gguf"))


def test_a_gguf_header_has_a_limit(tmp_path):
    """Files of any size are mapped, but a list of four billion numbers would become objects of 100 GB."""
    begin = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
    key = (1).to_bytes(8, "little") + b"k"
    of_numbers, of_texts = (bytes([9, 0, 0, 0, kind, 0, 0, 0]) for kind in (0, 8))
    text, many = bytes([8, 0, 0, 0]), (1 << 32).to_bytes(8, "little")
    for value, message in (
        (of_numbers + many, f"k has {1 << 32} elements, the limit is {MAX_ARRAY}"),
        (text + many, f"bytes or more, the limit is {MAX_HEADER_BYTES}"),
        (of_texts + (2).to_bytes(8, "little") + many, f"bytes or more, the limit is {MAX_HEADER_BYTES}"),
    ):
        path = tmp_path / "model.gguf"
        sparse(path)
        with path.open("r+b") as file:
            file.write(begin + key + value)
        with pytest.raises(CheckpointError, match=message):
            GgufFile(path)


@pytest.mark.parametrize("make", ALL)
def test_media(tmp_path, make):
    path = put(make, tmp_path / "a.png")
    expected = NOT_FILES.get(make, f"it has {SPARSE_BYTES} bytes, the limit is {MediaLimits.max_bytes}")
    with pytest.raises(RequestError, match=f"image 1: {path} cannot be read: {expected}"):
        read_source(MediaPart("image", "image 1", path), MediaLimits())


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(
    "arguments",
    [
        ["image", "a cat", "--image", "PATH"],
        ["demo", "--image", "PATH"],
        ["eval", "--text", "PATH"],
        ["eval", "--pictures", "FOLDER"],
        ["batch", "PATH", "OUT"],
    ],
)
def test_commands(tmp_path, capsys, arguments, make):
    path = put(make, tmp_path / "questions.jsonl")
    places = {"PATH": str(path), "FOLDER": str(tmp_path), "OUT": str(tmp_path / "out")}
    assert cli.main([places.get(one, one) for one in arguments]) == 2
    said = capsys.readouterr().err.splitlines()
    expected = NOT_FILES.get(make, ", the limit is ")
    if (arguments[0], make) == ("batch", sparse):
        expected = "--max-line sets the limit"
    name = str(path.resolve() if arguments[0] == "batch" else path)
    assert expected in said[-1] and name in said[-1] and len(said) <= 2  # the notice of the embedded model


@pytest.mark.parametrize("make", NOT_FILES)
def test_batch_output(tmp_path, make):
    path = put(make, tmp_path / "out")
    with pytest.raises(RequestError, match=f"{path} cannot be written: {NOT_FILES[make]}"):
        ResultFile(path)


def test_batch_output_of_endless_zeros(tmp_path, monkeypatch):
    path = put(sparse, tmp_path / "out")
    monkeypatch.setattr(results, "MAX_LINE_BYTES", 1 << 24)
    file = ResultFile(path)
    with pytest.raises(RequestError, match=f"{path}, line 1: more than {1 << 24} bytes"):
        list(file.entries())
    assert path.stat().st_size == SPARSE_BYTES  # it is not ours: nothing was cut off
    file.close()


@pytest.mark.parametrize("make", ALL)
def test_times_of_images(tmp_path, make):
    put(make, tmp_path / FILE)
    assert PastTimes(tmp_path, "m")._runs == []


def test_a_file_that_grows_while_it_is_read(tmp_path):
    """Files of the kernel have no size either."""
    assert files.read_bytes("/proc/self/status", 1 << 20).startswith(b"Name:")
    with pytest.raises(OSError, match="it has more than 5 bytes, the limit"):
        files.read_bytes("/proc/self/status", 5)


def test_a_template_that_is_no_text(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not UTF-8"):
        Tokenizer.from_folder(tmp_path)


def test_a_prompt_without_an_end(tmp_path, capsys):
    for arguments in (["chat", "-"], ["image", "-"], ["video", "-"]):
        with open("/dev/zero") as zeros, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", zeros)
            patch.chdir(tmp_path)
            assert cli.main(arguments) == 2
        assert "standard input has more than 16777216 characters" in capsys.readouterr().err


# Outputs: a device or a pipe takes what is written to it, a disk and a folder do not.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "which cannot be written: it is a directory, expected the name of a file"),
        (lambda path: path.symlink_to(path), "which cannot be written: Too many levels of symbolic links"),
    ],
)
@pytest.mark.parametrize(
    "arguments",
    [
        ["image", "a cat", "-o", "FILE.png"],
        ["video", "a cat", "-o", "FILE.mp4"],
        ["chat", "Hello", "--speak", "FILE.wav"],
        ["bench", "decode", "--json", "FILE.json"],
        ["bench", "kernels", "--plot", "FILE.png"],
        ["bench", "serve", "--json", "FILE.json"],
        ["bench", "image", "--json", "FILE.json"],
        ["eval", "--pictures", "SET", "--json", "FILE.json"],
    ],
)
def test_outputs_are_looked_at_before_anything_is_computed(tmp_path, capsys, arguments, make, message):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "questions.jsonl").write_text('{"image": "a.png", "question": "?", "answer": "a"}')
    arguments = [
        str(tmp_path) if one == "SET" else str(tmp_path / one.lower()) if one.startswith("FILE") else one
        for one in arguments
    ]
    name = next(one for one in arguments if "/file." in one)
    make(Path(name))
    assert cli.main([*arguments]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith(f"is {name}, {message}")


def test_a_plot_of_no_known_format(tmp_path):
    options = type("Options", (), {"json": None, "plot": tmp_path / "plot.docx"})
    with pytest.raises(RequestError, match=r"--plot is .*plot\.docx, expected a name that ends in \."):
        report.check_outputs(options)


def test_where_outputs_go(tmp_path):
    files.write_bytes(tmp_path / "file", b"abc")
    assert (tmp_path / "file").read_bytes() == b"abc"
    nowhere = tmp_path / "nowhere"
    nowhere.symlink_to("/dev/null")
    files.check_output(nowhere, "-o")
    files.write_bytes(nowhere, b"abc")
    with pytest.raises(RequestError, match="cannot be written: No space left on device"):
        files.write_bytes(put(full, tmp_path / "full"), b"abc")
    with pytest.raises(RequestError, match="cannot be written: it is a pipe without a reader"):
        files.write_bytes(put(pipe, tmp_path / "pipe"), b"abc")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    data = bytes(1 << 20)  # more than a pipe holds: what is left waits for the reader
    for _ in range(100):
        try:
            files.write_bytes(tmp_path / "pipe", data)
            break
        except RequestError:
            reader.join(0.01)
    reader.join()
    assert read == [data]
