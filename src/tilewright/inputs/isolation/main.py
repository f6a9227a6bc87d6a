"""The media decoder: a process that decodes untrusted media, with access to nothing but the current item.

Messages on its channel ask it to open an item, whose bytes are in shared memory, and then for its pixels or samples,
which it writes there. A `DecoderPool` starts it. It imports neither torch nor the engine.
"""

from __future__ import annotations

import importlib
import mmap
import os
import pkgutil
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np

from tilewright.inputs.audio import OpenedSound, read_sound
from tilewright.inputs.image import OpenedImage, read_image
from tilewright.inputs.media import MediaLimits
from tilewright.inputs.video import OpenedVideo, read_video
from tilewright.process.confine import confine, limit_cpu
from tilewright.process.frames import Channel
from tilewright.types import RequestError

# Modules that Pillow imports on first use: after `confine` no file can be opened.
_PILLOW = (
    "BmpImagePlugin", "ExifTags", "GifImagePlugin", "Image", "ImageChops", "ImageColor", "ImageFile", "ImageMode",
    "ImageOps", "ImagePalette", "ImageSequence", "JpegImagePlugin", "MpoImagePlugin", "PngImagePlugin",
    "PpmImagePlugin", "TiffImagePlugin", "TiffTags", "WebPImagePlugin",
)  # fmt: skip
_STANDARD = ("copy", "encodings.ascii", "encodings.latin_1", "encodings.utf_16", "tempfile")
_KEPT_MAP_BYTES = 2**24
# Beyond this the process ends itself, in case its parent is gone. (PR_SET_PDEATHSIG acts at the end of the thread that
# started it, not of the process.)
_GRACE_S = 10.0


def main(channel: Channel, shared_fd: int, memory_bytes: int) -> None:
    """Serve requests until the channel closes, within `memory_bytes` beyond the memory at the start."""
    import_all()
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 2)  # errors are shown up to here; libraries' output about a file is not
    os.close(nowhere)
    channel.send({"missing": confine(memory_bytes)})
    _Decoder(channel, shared_fd).serve()
    os._exit(0)  # a normal exit would need rights that were given up


def import_all() -> None:
    """Import all modules that decoding may need: after `confine` no file can be opened."""
    import av

    parts = [part.name for part in pkgutil.walk_packages(av.__path__, "av.")]
    wanted = [name for name in parts if name not in ("av.__main__", "av.datasets")]
    for name in (*_STANDARD, *(f"PIL.{name}" for name in _PILLOW), *wanted):
        importlib.import_module(name)
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # the request's limit applies, and is checked before decoding


class _Decoder:
    def __init__(self, channel: Channel, shared_fd: int) -> None:
        self._channel = channel
        self._shared_fd = shared_fd
        self._opened: OpenedImage | OpenedVideo | OpenedSound | None = None
        self._frames: Iterator[np.ndarray] = iter(())
        self._shared: mmap.mmap | None = None

    def serve(self) -> None:
        allowed_s = MediaLimits.max_decode_s
        while (message := self._channel.receive()) is not None:
            allowed_s = message.get("limits", {}).get("max_decode_s", allowed_s)
            # The engine ends this process when it takes too long. These limits apply if the engine is gone.
            signal.setitimer(signal.ITIMER_REAL, allowed_s + _GRACE_S)
            limit_cpu(allowed_s + _GRACE_S)
            reply = self._answer(message)
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._channel.send(reply)

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            match message["ask"]:
                case "open":
                    return self._open(message)
                case "decode":
                    assert isinstance(self._opened, OpenedImage | OpenedSound)
                    size_bytes = self._write(self._opened.decode(), 0, message["size_bytes"])
                    self._opened = None
                    return {"size_bytes": size_bytes}
                case "frames":
                    assert isinstance(self._opened, OpenedVideo)
                    self._frames = self._opened.frames(np.frombuffer(message["indices"], dtype=np.int64).tolist())
                    return {}
                case "frame":
                    size_bytes = self._write(next(self._frames), message["offset"], message["size_bytes"])
                    return {"size_bytes": size_bytes}
                case ask:
                    raise ValueError(f"asked to {ask!r}")
        except RequestError as error:
            return {"error": "refused", "message": str(error)[:1000]}
        except MemoryError:
            return {"error": "memory", "message": ""}
        except Exception as error:
            return {"error": "fault", "message": f"{type(error).__name__}: {error}"[:1000]}

    def _open(self, message: dict[str, Any]) -> dict[str, Any]:
        self._opened, self._frames = None, iter(())
        data = os.pread(self._shared_fd, message["size_bytes"], 0)
        name, limits = message["name"], MediaLimits(**message["limits"])
        match message["kind"]:
            case "image":
                self._opened = read_image(data, name, limits)
                return {"height": self._opened.height, "width": self._opened.width}
            case "audio":
                self._opened = read_sound(data, name, limits, message["sample_rate"])
                return {"duration_s": self._opened.duration_s}
            case "video":
                self._opened = read_video(data, name, limits)
                times = b"" if self._opened.times_s is None else np.array(self._opened.times_s).tobytes()
                known = {key: getattr(self._opened, key) for key in ("num_frames", "fps", "height", "width")}
                return {**known, "times": times}
            case kind:
                raise ValueError(f"asked to open {kind!r}")

    def _write(self, values: np.ndarray, offset: int, most_bytes: int) -> int:
        """Copy the values to the shared memory at the offset; return their size in bytes."""
        if values.nbytes > most_bytes:
            raise ValueError(f"{values.nbytes} bytes, where {most_bytes} were expected")
        end = offset + most_bytes
        # Keep the map while it is long enough, unless it is much longer than needed: address space is limited.
        if self._shared is None or not end <= len(self._shared) <= max(end, _KEPT_MAP_BYTES):
            if self._shared is not None:
                self._shared.close()
            self._shared = mmap.mmap(self._shared_fd, end, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        np.frombuffer(self._shared, np.uint8, values.nbytes, offset)[:] = values.reshape(-1).view(np.uint8)
        return values.nbytes
