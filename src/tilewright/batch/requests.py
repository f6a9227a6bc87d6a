"""The input of a batch: one request per line. All are checked before the batch starts, then read again one by one.

Paths of media are resolved here. In files of millions of lines, requests are found by custom_id through arrays of
digests, 24 bytes each.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from array import array
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tilewright.host import files
from tilewright.inputs.client_json import parse_json
from tilewright.server.api.endpoints import Gate
from tilewright.server.http.admission import ReserveMemory
from tilewright.types import MEDIA_KINDS, RequestError

_MAX_PATH = 4096  # characters; longer text is base64 without its "data:"


class PathGate:
    """Turns paths, relative to `folder`, into file:// URLs for the gate behind it."""

    def __init__(self, gate: Gate, folder: Path) -> None:
        self._gate = gate
        self._folder = folder

    async def resolve(self, messages: list[dict[str, Any]], hold: ReserveMemory) -> list[dict[str, Any]]:
        return await self._gate.resolve([self._in_message(message) for message in messages], hold)

    def _in_message(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        return {**message, "content": [self._in_part(part) for part in content]}

    def _in_part(self, part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        for kind in MEDIA_KINDS:
            for name in (kind, f"{kind}_url"):
                value = part.get(name)
                path = value.get("url") if isinstance(value, Mapping) else value
                if part.get("type") in (None, name) and isinstance(path, str) and _is_path(path):
                    rest = {key: item for key, item in part.items() if key not in ("type", name)}
                    return {**rest, "type": f"{kind}_url", f"{kind}_url": {"url": (self._folder / path).as_uri()}}
        return part


def _is_path(text: str) -> bool:
    return 0 < len(text) <= _MAX_PATH and not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text)


class IdIndex:
    """Numbers ids in the order of addition, then finds them by a digest of 128 bits, taken as unique."""

    def __init__(self) -> None:
        self._added = array("Q")
        self._halves = np.empty((0, 2), np.uint64)  # sorted
        self._order = np.empty(0, np.int64)  # the number of each sorted digest

    def add(self, custom_id: str) -> None:
        self._added.extend(_digest(custom_id))

    def sort(self) -> tuple[int, int] | None:
        """Prepare `find`; return the numbers of two equal ids if there are any."""
        halves = np.frombuffer(self._added, np.uint64).reshape(-1, 2)
        self._order = np.lexsort((halves[:, 1], halves[:, 0]))
        self._halves = halves[self._order]
        del halves
        self._added = array("Q")
        is_equal = (self._halves[1:] == self._halves[:-1]).all(axis=1)
        if not is_equal.any():
            return None
        first = int(is_equal.argmax())
        return int(self._order[first]), int(self._order[first + 1])

    def find(self, custom_id: str) -> int | None:
        """Return the number of an id; None if it was not added."""
        high, low = (np.uint64(half) for half in _digest(custom_id))
        place = int(np.searchsorted(self._halves[:, 0], high))
        while place < len(self._halves) and self._halves[place, 0] == high:
            if self._halves[place, 1] == low:
                return int(self._order[place])
            place += 1
        return None


def _digest(custom_id: str) -> tuple[int, int]:
    # JSON can contain a lone surrogate, UTF-8 cannot.
    digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


MAX_ID_CHARACTERS = 512
MAX_MODELS = 100  # different names per file


@dataclass(frozen=True)
class BatchRequest:
    """A line of the input."""

    custom_id: str
    url: str
    body: Mapping[str, Any]
    fingerprint: int  # 64 bits of a hash of all the above

    @property
    def id(self) -> str:
        """The request's id in the output: a hash of its content, which detects answers to a changed request."""
        return f"batch_req_{self.fingerprint:016x}"


def parse(line: bytes, urls: Collection[str]) -> BatchRequest:
    """Return the request of a line; raise RequestError if it is invalid."""
    fields = parse_json(line, "it")
    if not isinstance(fields, dict):
        raise RequestError("it is not an object")
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARACTERS:
        raise RequestError(f"custom_id is {custom_id!r:.60}, expected 1 to {MAX_ID_CHARACTERS} characters")
    if fields.get("method") != "POST":
        raise RequestError(f"method is {fields.get('method')!r:.60}, expected POST")
    if not isinstance(url, str) or url not in urls:
        raise RequestError(f"url is {url!r:.60}, expected {' or '.join(urls)}")
    if not isinstance(body, dict):
        raise RequestError(f"body is {body!r:.60}, expected an object")
    # Serialized again: spaces and the order of keys do not matter.
    content = json.dumps([custom_id, url, body], sort_keys=True).encode()
    fingerprint = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
    return BatchRequest(custom_id, url, body, fingerprint)


class LinePlace(NamedTuple):
    """The place of a request in its file."""

    number: int
    offset: int
    fingerprint: int


def read_request(file: BinaryIO, place: LinePlace, urls: Collection[str], max_line_bytes: int) -> BatchRequest:
    """Return the request at a place; raise RequestError if the file has changed."""
    file.seek(place.offset)
    try:
        request = parse(file.readline(max_line_bytes + 2), urls)
    except RequestError:
        request = None
    if request is None or request.fingerprint != place.fingerprint:
        raise RequestError(f"{file.name} has changed since it was checked")
    return request


class RequestFile:
    """Requests in a file, with unique ids. Each needs 17 bytes of memory, and 24 more until `left` is called."""

    def __init__(self, path: Path, urls: Collection[str], max_line_bytes: int) -> None:
        """Read and check the whole file; raise RequestError for the first invalid line."""
        self.path = path
        self._urls = urls
        self._max_line_bytes = max_line_bytes
        self._offsets = array("q")
        self._fingerprints = array("Q")
        self.models: dict[str, int] = {}  # model name -> its first line
        self._file = _open(path)
        try:
            self._index: IdIndex | None = self._scan()
        except BaseException:
            self._file.close()
            raise
        self._is_done = bytearray(len(self._offsets))
        self.num_done = 0

    def __len__(self) -> int:
        return len(self._offsets)

    def __enter__(self) -> RequestFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def mark_done(self, custom_id: str, request_id: str) -> None:
        """Mark a request as done; raise RequestError if `request_id` belongs to a different request."""
        assert self._index is not None, "left() was called"
        number = self._index.find(custom_id)
        if number is None:
            raise RequestError(f"custom_id {custom_id!r} is not in {self.path}")
        if request_id != f"batch_req_{self._fingerprints[number]:016x}":
            raise RequestError(f"custom_id {custom_id!r} is another request in {self.path}")
        if self._is_done[number]:
            raise RequestError(f"custom_id {custom_id!r} is answered twice")
        self._is_done[number] = True
        self.num_done += 1

    def finish(self, number: int) -> bool:
        """Mark the request with this number as done; return False if it already was."""
        if self._is_done[number]:
            return False
        self._is_done[number] = True
        self.num_done += 1
        return True

    def left(self) -> Iterator[BatchRequest]:
        """Yield the requests that are not done, in order."""
        for place in self.places_left():
            yield self._read(place)

    def places_left(self) -> Iterator[LinePlace]:
        """Yield the places of requests that are not done, in order."""
        self._index = None
        for number, is_done in enumerate(self._is_done):
            if not is_done:
                yield self._place(number)

    def _place(self, number: int) -> LinePlace:
        return LinePlace(number, self._offsets[number], self._fingerprints[number])

    def _read(self, place: LinePlace) -> BatchRequest:
        return read_request(self._file, place, self._urls, self._max_line_bytes)

    def _scan(self) -> IdIndex:
        index = IdIndex()
        for line_number, offset, line in self._lines():
            try:
                request = parse(line, self._urls)
                self._note_model(request, line_number)
            except RequestError as error:
                raise RequestError(f"{self.path}, line {line_number}: {error}") from error
            index.add(request.custom_id)
            self._offsets.append(offset)
            self._fingerprints.append(request.fingerprint)
        duplicates = index.sort()
        if duplicates is not None:
            first, second = (self._offsets[number] for number in duplicates)
            custom_id = self._read(self._place(duplicates[0])).custom_id
            raise RequestError(
                f"{self.path}, line {self._line_number(second)}: custom_id {custom_id!r:.60} is also in line "
                f"{self._line_number(first)}, expected unique ids"
            )
        return index

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (line number, offset, line) of every line that is not blank."""
        offset = line_number = 0
        while line := self._file.readline(self._max_line_bytes + 2):
            line_number += 1
            if len(line.rstrip(b"\r\n")) > self._max_line_bytes:
                limit = self._max_line_bytes
                raise RequestError(
                    f"{self.path}, line {line_number}: more than {limit} bytes; --max-line sets the limit"
                )
            mark_bytes = len(codecs.BOM_UTF8) if offset == 0 and line.startswith(codecs.BOM_UTF8) else 0
            if line[mark_bytes:].strip():
                yield line_number, offset + mark_bytes, line[mark_bytes:]
            offset += len(line)

    def _note_model(self, request: BatchRequest, line_number: int) -> None:
        name = request.body.get("model")
        if isinstance(name, str) and name not in self.models:
            if len(self.models) == MAX_MODELS:
                raise RequestError(f"model is {name!r:.60}, the file names more than {MAX_MODELS} models, the limit")
            self.models[name] = line_number

    def _line_number(self, offset: int) -> int:
        self._file.seek(0)
        count = 1
        while offset and (block := self._file.read(min(offset, 2**20))):
            count += block.count(b"\n")
            offset -= len(block)
        return count


def _open(path: Path) -> BufferedReader:
    try:
        return files.open_regular(path)  # the file is read twice, which a pipe does not allow
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
