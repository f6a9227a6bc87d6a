import contextlib
import os
import socket

import pytest

from tilewright.server.media.sources import FileError, FolderReader
from tilewright.types import RequestError

NOT_ALLOWED = "files are read only from folders given with --allow-files DIR"


@pytest.fixture
def disk(tmp_path):
    """An open folder, a link to it, and files beside it that must not be read."""
    (tmp_path / "open" / "deep").mkdir(parents=True)
    (tmp_path / "open" / "a b.png").write_bytes(b"picture")
    (tmp_path / "open" / "deep" / "c.png").write_bytes(b"deep")
    (tmp_path / "opened").mkdir()
    (tmp_path / "opened" / "secret").write_bytes(b"secret")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "link").symlink_to("open")
    (tmp_path / "open" / "inward").symlink_to("deep/c.png")
    (tmp_path / "open" / "outward").symlink_to("../secret")
    (tmp_path / "open" / "up").symlink_to("..")
    return tmp_path


def read(disk, source, *folders, max_bytes=100):
    folders = folders or (disk / "open",)
    return FolderReader(folders).read(source.replace("DISK", str(disk)), max_bytes)


@pytest.mark.parametrize(
    "source",
    ["DISK/open/a b.png", "file://DISK/open/a%20b.png", "FILE://localhostDISK/open/a%20b.png",
     "DISK/open/deep/../a b.png", "DISK/open/deep/../../open/a b.png"],
)  # fmt: skip
def test_files_in_the_folder(disk, source):
    assert read(disk, source) == b"picture"


def test_links(disk):
    assert read(disk, "DISK/open/inward") == b"deep"
    assert read(disk, "DISK/link/a b.png", disk / "link") == b"picture"
    assert read(disk, "DISK/open/a b.png", disk / "link") == b"picture"
    with pytest.raises(FileError, match=NOT_ALLOWED):
        read(disk, "DISK/open/outward")
    with pytest.raises(FileError, match=NOT_ALLOWED):
        read(disk, "DISK/open/up/secret")


@pytest.mark.parametrize(
    "source",
    ["DISK/secret", "DISK/nothing", "file://DISK/secret", "DISK/open/../secret", "file://DISK/open/%2e%2e/secret",
     "DISK/opened/secret", "DISK/open/up/secret", "/etc/passwd", "file:///etc/passwd", "DISK", "open/a b.png", "", "~",
     "DISK/open/up/nothing", "/proc/self/environ", "/dev/zero", "//etc/passwd"],
)  # fmt: skip
def test_files_elsewhere(disk, source):
    """Whether they are there or not."""
    with pytest.raises(FileError, match=NOT_ALLOWED):
        read(disk, source)


def test_without_folders_nothing_is_read(disk):
    for source in (f"{disk}/open/a b.png", f"file://{disk}/open/nothing"):
        with pytest.raises(FileError, match=NOT_ALLOWED):
            FolderReader(()).read(source, 100)


@pytest.mark.parametrize(
    "source,message",
    [
        ("DISK/open/nothing", "cannot be read: No such file or directory"),
        ("DISK/open/a b.png/c", "cannot be read: Not a directory"),
        ("DISK/open", "it is not a regular file"),
        ("DISK/open/nul\0byte", "cannot be read: it is not a path"),
        ("file://DISK/open/nul%00byte", "cannot be read: it is not a path"),
        ("DISK/open/\ud800", "cannot be read: "),
        ("file://server/share/a.png", "expected file:///PATH"),
        ("file:a.png", "expected file:///PATH"),
        ("file://[a", "cannot be read: it is not a path"),
        ("DISK/open/" + "x" * 300, "cannot be read: File name too long"),
    ],
)  # fmt: skip
def test_what_cannot_be_read(disk, source, message):
    with pytest.raises(FileError, match=message):
        read(disk, source)


def test_only_regular_files(disk, monkeypatch):
    os.mkfifo(disk / "open" / "pipe")
    with pytest.raises(FileError, match="it is not a regular file"):
        read(disk, "DISK/open/pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(disk)  # names of sockets are short
        listening.bind("open/socket")
        with pytest.raises(FileError, match="cannot be read: No such device or address"):
            read(disk, "DISK/open/socket")
    with pytest.raises(FileError, match="it is not a regular file"):
        FolderReader((disk, *map(type(disk), ["/dev"]))).read("/dev/zero", 100)


def test_sizes(disk):
    assert read(disk, "DISK/open/a b.png", max_bytes=7) == b"picture"
    with pytest.raises(FileError, match="7 bytes, the limit is 6"):
        read(disk, "DISK/open/a b.png", max_bytes=6)


def test_a_folder_that_becomes_a_link_while_it_is_read(disk, monkeypatch):
    """Between the check and the opening: the path of the open file decides."""
    real_open = os.open

    def swap_then_open(path, flags, *args):
        (disk / "open" / "deep").rename(disk / "open" / "was")
        (disk / "open" / "deep").symlink_to(disk / "opened")
        return real_open(path, flags, *args)

    (disk / "open" / "deep" / "secret").write_bytes(b"harmless")
    monkeypatch.setattr(os, "open", swap_then_open)
    with pytest.raises(FileError, match=NOT_ALLOWED):
        read(disk, "DISK/open/deep/secret")


def test_no_handle_is_left_open(disk):
    before = len(os.listdir("/proc/self/fd"))
    for source in ("DISK/open", "DISK/open/a b.png", "DISK/open/nothing", "DISK/open/outward"):
        for max_bytes in (1, 100):
            with contextlib.suppress(FileError):
                read(disk, source, max_bytes=max_bytes)
    assert len(os.listdir("/proc/self/fd")) == before


def test_folders_must_be_there(disk):
    with pytest.raises(RequestError, match="nowhere is not a folder"):
        FolderReader((disk / "nowhere",))
