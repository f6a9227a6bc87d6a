"""The process that decodes untrusted media. It has the current item in memory and can reach nothing else.

It is asked over a socket to open an item, whose bytes lie in shared memory (the slate), and then for its pixels or
samples, which it puts there in turn. A `DecoderPool` starts it. It imports neither torch nor the engine.
"""

from __future__ import annotations

import importlib
import mmap
import os
import pkgutil
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from tilewright.inputs.audio import SoundFile, read_sound
from tilewright.inputs.image import PictureFile, read_picture
from tilewright.inputs.isolation.confine import confine, limit_cpu
from tilewright.inputs.isolation.pool import pack, receive
from tilewright.inputs.media import MediaLimits
from tilewright.inputs.video import VideoFile, read_video
from tilewright.types import RequestError

# What Pillow imports when it is first needed, and all of PyAV: afterwards no file can be opened.
_PILLOW = (
    "BmpImagePlugin", "ExifTags", "GifImagePlugin", "Image", "ImageChops", "ImageColor", "ImageFile", "ImageMode",
    "ImageOps", "ImagePalette", "ImageSequence", "JpegImagePlugin", "MpoImagePlugin", "PngImagePlugin",
    "PpmImagePlugin", "TiffImagePlugin", "TiffTags", "WebPImagePlugin",
)  # fmt: skip
_STANDARD = ("copy", "encodings.ascii", "encodings.latin_1", "encodings.utf_16", "tempfile")
_KEPT_MAP_BYTES = 2**24
# After which it ends by itself, should nobody be left to end it. (PR_SET_PDEATHSIG would end it with the thread that
# started it, not the process.)
_GRACE_S = 10.0


def main() -> None:
    """Serves requests until the socket closes. Arguments: the socket, the slate, bytes of memory."""
    link = socket.socket(fileno=int(sys.argv[1]))
    slate, memory_bytes = int(sys.argv[2]), int(sys.argv[3])
    import_all()
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 2)  # until here errors are shown; what libraries say about a file is not
    os.close(nowhere)
    missing = confine(memory_bytes)
    link.sendall(pack({"missing": missing}))
    _Decoder(link, slate).serve()


def import_all() -> None:
    """Imports all that decoding may need: afterwards no file can be opened."""
    import av

    parts = [part.name for part in pkgutil.walk_packages(av.__path__, "av.")]
    wanted = [name for name in parts if name not in ("av.__main__", "av.datasets")]
    for name in (*_STANDARD, *(f"PIL.{name}" for name in _PILLOW), *wanted):
        importlib.import_module(name)
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # the limit is that of the request, and is checked before anything is decoded


class _Decoder:
    def __init__(self, link: socket.socket, slate: int) -> None:
        self._link = link
        self._slate = slate
        self._file: PictureFile | VideoFile | SoundFile | None = None
        self._frames: Iterator[np.ndarray] = iter(())
        self._shared: mmap.mmap | None = None

    def serve(self) -> None:
        allowed_s = MediaLimits.max_decode_s
        while True:
            header, payload = receive(self._read_exactly)
            allowed_s = header.get("limits", {}).get("max_decode_s", allowed_s)
            # The engine ends this process when it takes too long. These limits are for when the engine is gone.
            signal.setitimer(signal.ITIMER_REAL, allowed_s + _GRACE_S)
            limit_cpu(allowed_s + _GRACE_S)
            reply = self._answer(header, payload)
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._link.sendall(reply)

    def _read_exactly(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            part = self._link.recv(num_bytes - len(data))
            if not part:
                os._exit(0)
            data += part
        return bytes(data)

    def _answer(self, header: dict[str, Any], payload: bytes) -> bytes:
        try:
            match header["ask"]:
                case "open":
                    return self._open(header)
                case "decode":
                    assert isinstance(self._file, PictureFile | SoundFile)
                    size_bytes = self._put(self._file.decode(), 0, header["size_bytes"])
                    self._file = None
                    return pack({"size_bytes": size_bytes})
                case "frames":
                    assert isinstance(self._file, VideoFile)
                    self._frames = self._file.frames(np.frombuffer(payload, dtype=np.int64).tolist())
                    return pack({})
                case "frame":
                    size_bytes = self._put(next(self._frames), header["offset"], header["size_bytes"])
                    return pack({"size_bytes": size_bytes})
                case ask:
                    raise ValueError(f"asked to {ask!r}")
        except RequestError as error:
            return pack({"error": "refused", "message": str(error)[:1000]})
        except MemoryError:
            return pack({"error": "memory", "message": ""})
        except Exception as error:
            return pack({"error": "fault", "message": f"{type(error).__name__}: {error}"[:1000]})

    def _open(self, header: dict[str, Any]) -> bytes:
        self._file, self._frames = None, iter(())
        data = os.pread(self._slate, header["size_bytes"], 0)
        name, limits = header["name"], MediaLimits(**header["limits"])
        match header["kind"]:
            case "image":
                self._file = read_picture(data, name, limits)
                return pack({"height": self._file.height, "width": self._file.width})
            case "audio":
                self._file = read_sound(data, name, limits, header["sample_rate"])
                return pack({"duration_s": self._file.duration_s})
            case "video":
                self._file = read_video(data, name, limits)
                times = b"" if self._file.times_s is None else np.array(self._file.times_s).tobytes()
                known = {key: getattr(self._file, key) for key in ("num_frames", "fps", "height", "width")}
                return pack(known, times)
            case kind:
                raise ValueError(f"asked to open {kind!r}")

    def _put(self, values: np.ndarray, offset: int, most_bytes: int) -> int:
        """Copies the values to the slate, at the offset; returns their bytes."""
        if values.nbytes > most_bytes:
            raise ValueError(f"{values.nbytes} bytes, where {most_bytes} were expected")
        end = offset + most_bytes
        # Kept while it is long enough, but not for long once it is long: address space is what is limited.
        if self._shared is None or not end <= len(self._shared) <= max(end, _KEPT_MAP_BYTES):
            if self._shared is not None:
                self._shared.close()
            self._shared = mmap.mmap(self._slate, end, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        np.frombuffer(self._shared, np.uint8, values.nbytes, offset)[:] = values.reshape(-1).view(np.uint8)
        return values.nbytes
