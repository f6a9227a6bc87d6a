"""Packed weights on disk: the same values the second time, and no file that is not whole, current and this model's."""

import dataclasses
import errno
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tilewright import cli, config
from tilewright.ops.packed import weight_format
from tilewright.weights import cache, values
from tilewright.weights import cache as checksums
from tilewright.weights import cache as entry_check
from tilewright.weights.checkpoint import open_checkpoint
from tilewright.weights.conv import Unpacked
from tilewright.weights.linear import LinearWeight, PatchWeight
from tilewright.weights.load import load
from tilewright.weights.safetensors import MappedFile
from tilewright.weights.spec import Weight


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


TENSORS = {
    "embed.weight": random(300, 2048),
    "norm": random(64),
    "scalar": random(),
    "q.weight": random(64, 32),
    "q.bias": random(64),
    "gate.weight": random(48, 32),
    "up.weight": random(48, 32),
    "proj.weight": random(32, 3, 2, 4, 4),
    "proj.bias": random(32),
}


def make_model() -> list[Weight]:
    return [
        LinearWeight([("embed", 300)], 2048),
        Unpacked("norm", 64),
        Unpacked("scalar"),
        LinearWeight([("q", 64)], 32, bias=True),
        LinearWeight([("gate", 48), ("up", 48)], 32, gated=True),
        PatchWeight("proj", (32, 3, 2, 4, 4)),
    ]


def tensors_in(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [t for field in dataclasses.fields(value) for t in tensors_in(getattr(value, field.name))]
    return []


def plain_fields(value: object) -> list[object]:
    if dataclasses.is_dataclass(value):
        return [x for field in dataclasses.fields(value) for x in plain_fields(getattr(value, field.name))]
    return [] if isinstance(value, torch.Tensor) else [value]


def same_values(first: list[Weight], second: list[Weight]) -> bool:
    for a, b in zip(first, second, strict=True):
        if type(a.value) is not type(b.value) or plain_fields(a.value) != plain_fields(b.value):
            return False
        pairs = zip(tensors_in(a.value), tensors_in(b.value), strict=True)
        if not all(x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y) for x, y in pairs):
            return False
    return True


@pytest.fixture
def start(make_checkpoint, tmp_path):
    """Loads a fresh model as a new process would; the model and the report."""
    make_checkpoint(TENSORS)

    def run(model: list[Weight] | None = None, dtype: torch.dtype = torch.float32, rename=lambda name: name):
        model = model or make_model()
        checkpoint = open_checkpoint(tmp_path / "checkpoint")
        return model, load(model, checkpoint, dtype=dtype, rename=rename, cache_dir=tmp_path / "cache")

    return run


def entries(tmp_path) -> set[str]:
    return {path.name for path in (tmp_path / "cache").iterdir()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_start_has_the_same_values(start, tmp_path, dtype):
    first, report = start(dtype=dtype)
    assert not report.from_cache and entries(tmp_path) == {report.cache_path.name}
    second, report = start(dtype=dtype)
    assert report.from_cache and same_values(first, second)
    # Writing to a value changes this process's copy alone.
    second[1].value.zero_()
    third, report = start(dtype=dtype)
    assert report.from_cache and same_values(first, third)


def test_tensors_begin_on_boundaries(start):
    start()
    model, report = start()
    assert report.from_cache
    tensors = [tensor for weight in model for tensor in tensors_in(weight.value)]
    assert len(tensors) == 10 and all(tensor.data_ptr() % 4096 == 0 for tensor in tensors)


def test_off(make_checkpoint, tmp_path):
    report = load(make_model(), make_checkpoint(TENSORS), dtype=torch.float32)
    assert report.cache_path is None and not report.from_cache


def cut(data: bytes) -> bytes:
    return data[:-1]


def cut_in_the_middle(data: bytes) -> bytes:
    return data[: len(data) // 2]


def emptied(data: bytes) -> bytes:
    return b""


def longer(data: bytes) -> bytes:
    return data + b"\0"


def header_changed(data: bytes) -> bytes:
    at = data.rindex(b'"gated": true')
    return data[:at] + b'"gated":false' + data[at + 13 :]


def header_place_changed(data: bytes) -> bytes:
    return data[:-40] + (len(data) * 2).to_bytes(8, "little") + data[-32:]


def middle_removed(data: bytes) -> bytes:
    return data[4096:]


def bit_flipped(data: bytes) -> bytes:
    at = 1 << 20  # within the first weight
    return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]


def last_byte_flipped(data: bytes) -> bytes:
    at = int.from_bytes(data[-40:-32], "little") - 1
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGES = [cut, cut_in_the_middle, emptied, longer, header_changed, header_place_changed, middle_removed]


@pytest.mark.parametrize("damage", [*DAMAGES, bit_flipped, last_byte_flipped])
def test_a_damaged_entry_is_replaced(start, caplog, damage):
    first, report = start()
    path = report.cache_path
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        second, report = start()
    assert not report.from_cache and same_values(first, second)
    assert "is not used" in caplog.text and str(path) in caplog.text
    assert path.read_bytes() == whole
    assert start()[1].from_cache


def test_a_large_entry_is_sampled_at_the_start_and_then_read_through(start, monkeypatch, caplog):
    monkeypatch.setattr(cache, "SAMPLE_BLOCKS", 1)
    monkeypatch.setattr(entry_check, "BYTES_PER_S", 1e12)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: ended_by.append(arguments.exc_value))
    ended_by: list[BaseException | None] = []
    path = start()[1].cache_path
    whole = path.read_bytes()

    def read_through(data: bytes, sampled: int) -> list[Exception]:
        path.write_bytes(data)
        monkeypatch.setattr(cache.random, "sample", lambda blocks, count: [sampled])
        report = start()[1]
        assert report.from_cache
        told: list[Exception] = []
        entry_check.EntryCheck(report.unchecked, told.append).join()
        return told

    assert read_through(whole, sampled=0) == [] and path.is_file()
    (error,) = read_through(bit_flipped(whole), sampled=0)
    assert re.search(r"\.packed was damaged after it was written, in bytes 1048576 to 2097152", str(error))
    assert ended_by == [error] and str(error) in caplog.text
    assert not path.exists() and not start()[1].from_cache and path.read_bytes() == whole


def test_a_small_entry_is_wholly_compared_at_the_start(start):
    start()
    assert start()[1].unchecked is None


def test_a_check_that_is_closed_ends_at_once(start, monkeypatch):
    monkeypatch.setattr(cache, "SAMPLE_BLOCKS", 1)
    monkeypatch.setattr(entry_check, "BYTES_PER_S", 1e3)  # seventeen minutes a block
    start()
    check = entry_check.EntryCheck(start()[1].unchecked, lambda error: None)
    began_s = time.perf_counter()
    check.close()
    assert time.perf_counter() - began_s < 5


def test_an_entry_of_another_model_under_this_name(start, tmp_path):
    _, other = start(dtype=torch.bfloat16)
    _, report = start()
    os.replace(other.cache_path, report.cache_path)
    assert not start()[1].from_cache


def test_every_thing_that_matters_is_in_the_name(start):
    paths = [start()[1].cache_path, start(dtype=torch.bfloat16)[1].cache_path]
    other_gate = make_model()
    other_gate[4] = LinearWeight([("gate", 48), ("up", 48)], 32, gated=False)
    paths.append(start(other_gate)[1].cache_path)
    swapped = {"gate.weight": "up.weight", "up.weight": "gate.weight"}
    paths.append(start(rename=lambda name: swapped.get(name, name))[1].cache_path)
    assert len(set(paths)) == 4


def test_a_changed_checkpoint_is_packed_again_and_its_old_entry_removed(start, tmp_path):
    _, old = start()
    changed = TENSORS | {"norm": random(64) + 1}
    save_file(changed, tmp_path / "checkpoint" / "model.safetensors")
    model, new = start()
    assert not new.from_cache and torch.equal(model[1].value, changed["norm"])
    assert entries(tmp_path) == {new.cache_path.name} and new.cache_path != old.cache_path


def test_another_layout_is_not_used(start, tmp_path, monkeypatch):
    start()
    monkeypatch.setattr(cache, "LAYOUT_VERSION", cache.LAYOUT_VERSION + 1)
    _, report = start()
    assert not report.from_cache and entries(tmp_path) == {report.cache_path.name}


@pytest.mark.parametrize("change", [{"layout": "tiles of another level"}, {"name": "int8"}, {"group_size": 32}])
def test_other_formats_of_packed_weights_have_entries_of_their_own(start, tmp_path, monkeypatch, change):
    start()
    monkeypatch.setattr(cache, "weight_format", lambda dtype: dataclasses.replace(weight_format(dtype), **change))
    assert not start()[1].from_cache
    monkeypatch.undo()
    assert start()[1].from_cache  # the first one was left in place


def test_the_entries_used_last_stay(tmp_path, make_checkpoint):
    def start(number: int):
        path = tmp_path / str(number)
        checkpoint = open_checkpoint(path) if path.exists() else make_checkpoint({"t": random(8)}, str(number))
        return load([Unpacked("t", 8)], checkpoint, dtype=torch.float32, cache_dir=tmp_path / "cache")

    reports = [start(number) for number in range(cache.MAX_ENTRIES)]
    for age_s, report in enumerate(reversed(reports)):
        os.utime(report.cache_path, (1e9 - age_s, 1e9 - age_s))
    assert start(0).from_cache  # now the youngest
    start(100)
    kept = [report.cache_path.exists() for report in reports]
    assert kept == [True, False] + [True] * (cache.MAX_ENTRIES - 2)
    assert len(entries(tmp_path)) == cache.MAX_ENTRIES


def test_what_a_dead_process_left_is_removed(start, tmp_path):
    (tmp_path / "cache").mkdir()
    for name, age_s in (("old.partial", 2 * cache.ABANDONED_S), ("young.partial", 1.0)):
        (tmp_path / "cache" / name).write_bytes(b"x")
        at_s = (tmp_path / "cache" / name).stat().st_mtime - age_s
        os.utime(tmp_path / "cache" / name, (at_s, at_s))
    _, report = start()
    assert entries(tmp_path) == {"young.partial", report.cache_path.name}


def test_a_full_disk_is_a_warning(start, tmp_path, monkeypatch, caplog):
    def fail(writer, tensor) -> None:
        writer.write(memoryview(b"some of it"))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "_write_tensor", fail)
    with caplog.at_level(logging.WARNING):
        model, _ = start()
    assert torch.equal(model[1].value, TENSORS["norm"])
    assert "No space left on device" in caplog.text and len(caplog.records) == 1
    assert entries(tmp_path) == set()


def test_room_is_left_on_the_disk(start, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cache, "MIN_FREE_BYTES", 1 << 60)
    with caplog.at_level(logging.WARNING):
        start()
    assert "leaves" in caplog.text and entries(tmp_path) == set()


def test_a_folder_that_cannot_be_made_is_a_warning(start, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file")
    with caplog.at_level(logging.WARNING):
        model, report = start()
    assert not report.from_cache and torch.equal(model[1].value, TENSORS["norm"])
    assert "are not cached in" in caplog.text


def test_a_writer_that_dies_leaves_no_entry(start, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        start()
    assert entries(tmp_path) == set()


def test_values_of_any_nesting(tmp_path):
    value = (random(3, 5), None, True, 7, 0.5, "text", (random(0), random().bfloat16()))
    encoder = values.ValueEncoder()
    encoded = json.loads(json.dumps(encoder.encode(value)))
    with (tmp_path / "file").open("wb") as file:
        writer = checksums.ChecksummedWriter(file)
        for offset, tensor in encoder.tensors:
            writer.pad_to(offset)
            cache._write_tensor(writer, tensor)
    back = values.decode(encoded, MappedFile(tmp_path / "file"))
    assert back[1:6] == value[1:6]
    for a, b in ((back[0], value[0]), (back[6][0], value[6][0]), (back[6][1], value[6][1])):
        assert a.dtype == b.dtype and torch.equal(a, b)
    with pytest.raises(TypeError, match="a weight's value has a list, which cannot be kept"):
        encoder.encode([1])


def test_recipes_are_made_of_plain_settings():
    weight = Unpacked("t", 8)
    weight.rule = lambda tensor: tensor
    with pytest.raises(TypeError, match=r"Unpacked\.rule is .*expected numbers, strings or tuples"):
        _ = weight.recipe


@pytest.mark.parametrize("damage", [*DAMAGES, bit_flipped, last_byte_flipped])
def test_the_command_removes_what_is_damaged(start, tmp_path, monkeypatch, capsys, damage):
    settings = config.resolve({"TILEWRIGHT_CACHE_DIR": str(tmp_path / "cache")}, [0])
    monkeypatch.setattr(config, "current", lambda: settings)
    damaged, whole = start()[1].cache_path, start(dtype=torch.bfloat16)[1].cache_path
    assert cli.main(["cache", "verify"]) == 0
    assert capsys.readouterr().out.count("  whole") == 2
    damaged.write_bytes(damage(damaged.read_bytes()))
    assert cli.main(["cache"]) == 0 and damaged.is_file()
    assert cli.main(["cache", "verify"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (told,) = [line for line in lines if "removed: " in line]
    assert damaged.name in told and not damaged.exists() and whole.is_file()


def test_the_command_without_a_cache(tmp_path, monkeypatch, capsys):
    for value, text in (
        ("off", "TILEWRIGHT_CACHE_DIR is off"),
        (str(tmp_path / "none"), "0 of packed weights, 0.0 GB"),
    ):
        settings = config.resolve({"TILEWRIGHT_CACHE_DIR": value}, [0])
        monkeypatch.setattr(config, "current", lambda settings=settings: settings)
        assert cli.main(["cache", "verify"]) == 0 and text in capsys.readouterr().out


def make_pipe(path):
    os.mkfifo(path)


def make_endless(path):
    path.symlink_to("/dev/zero")


def make_sparse(path):
    with path.open("wb") as file:
        file.truncate(10 << 30)


@pytest.mark.parametrize("make", [make_pipe, make_endless, make_sparse, os.mkdir])
def test_what_is_no_file_in_the_entry_s_place(start, caplog, make):
    """A pipe, a device or a file of another format is replaced; a folder is not, and is one warning."""
    first, report = start()
    report.cache_path.unlink()
    make(report.cache_path)
    caplog.clear()
    second, report = start()
    assert not report.from_cache and same_values(first, second)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    if make is os.mkdir:
        assert len(warnings) == 1 and "(Is a directory)" in warnings[0]
    else:
        assert len(warnings) == (make is make_sparse) and start()[1].from_cache


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["open", "replace", "mkdir", "unlink", "utime", "stat", "fsync"])
def test_a_system_call_that_fails_stops_no_start(start, tmp_path, monkeypatch, caplog, call, number):
    """Whatever fails beneath the cache folder, with or without an entry there: at most one warning, and the weights."""
    first, report = start()
    before = getattr(os, call)

    def fail(path, *arguments, **options):
        if isinstance(path, int) or str(path).startswith(str(tmp_path / "cache")):
            raise OSError(number, os.strerror(number), str(path))
        return before(path, *arguments, **options)

    for is_there in (True, False):
        if not is_there:
            report.cache_path.unlink(missing_ok=True)
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            second, _ = start()
        assert same_values(first, second)
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 1


LOAD_AS_NOBODY = """
import os, sys
*sys.path, folder = sys.argv[1:]
import logging
from pathlib import Path
import torch
import test_packed_cache
from tilewright.weights.checkpoint import open_checkpoint
from tilewright.weights.load import load
logging.basicConfig(level=logging.WARNING, format="%(message)s")
def start(cache_dir):
    checkpoint = open_checkpoint(Path(folder, "checkpoint"))
    return load(test_packed_cache.make_model(), checkpoint, dtype=torch.float32, cache_dir=cache_dir)
start(None)  # imports the rest, which may be in a folder of root's
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for cache in sorted(Path(folder).glob("cache*")):
    print("from the cache" if start(cache).from_cache else "packed")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_cache_folder_of_another_user(make_checkpoint):
    """Nobody starts with root's folders: closed, readable though its file is not, and one for all to write to."""
    with tempfile.TemporaryDirectory() as name:  # pytest's own are closed to others
        folder, modes = Path(name), (0o700, 0o755, 0o1777)
        folder.chmod(0o755)
        shutil.copytree(make_checkpoint(TENSORS).path, folder / "checkpoint")
        for path in (folder / "checkpoint").iterdir():
            path.chmod(0o644)
        checkpoint = open_checkpoint(folder / "checkpoint")
        caches = [folder / f"cache{number}" for number in range(len(modes))]
        for path, mode in zip(caches, modes, strict=True):
            load(make_model(), checkpoint, dtype=torch.float32, cache_dir=path)
            path.chmod(mode)
        before = [os.listdir(path) for path in caches]
        command = [sys.executable, "-c", LOAD_AS_NOBODY, *sys.path, name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout == "packed\n" * len(modes), done.stderr
        for path, warning, mode in zip(caches, done.stderr.splitlines(), modes, strict=True):
            assert f"packed weights are not cached in {path} (" in warning
            assert "Permission denied" in warning or "Operation not permitted" in warning
            assert ("nor read from there" in warning) == (mode != 0o700)
        assert [os.listdir(path) for path in caches] == before
