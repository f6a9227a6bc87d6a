"""The input of a batch: one request per line, all checked before the batch starts, then read again one by one."""

from __future__ import annotations

import codecs
import hashlib
import json
from array import array
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tilewright import files
from tilewright.batch.index import IdIndex
from tilewright.inputs.client_json import parse_json
from tilewright.types import RequestError

MAX_ID_CHARACTERS = 512
MAX_MODELS = 100  # different names in one file


@dataclass(frozen=True)
class Request:
    """A line of the input."""

    custom_id: str
    url: str
    body: Mapping[str, Any]
    fingerprint: int  # 64 bits of a hash of all the above

    @property
    def id(self) -> str:
        """Its id in the output: equal for equal requests, so that answers to a changed request are noticed."""
        return f"batch_req_{self.fingerprint:016x}"


def parse(line: bytes, urls: Collection[str]) -> Request:
    """The Request of a line; RequestError if it is invalid."""
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
    # Serialized again, so that spaces and the order of keys do not matter.
    content = json.dumps([custom_id, url, body], sort_keys=True).encode()
    fingerprint = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
    return Request(custom_id, url, body, fingerprint)


class Place(NamedTuple):
    """Where a request is in its file."""

    number: int
    offset: int
    fingerprint: int


def read_request(file: BinaryIO, place: Place, urls: Collection[str], max_line_bytes: int) -> Request:
    """The request at a place; RequestError if another is there now."""
    file.seek(place.offset)
    try:
        request = parse(file.readline(max_line_bytes + 2), urls)
    except RequestError:
        request = None
    if request is None or request.fingerprint != place.fingerprint:
        raise RequestError(f"{file.name} has changed since it was checked")
    return request


class RequestFile:
    """Requests in a file, with unique ids. Each takes 17 bytes of memory, and 24 more until `left` is called."""

    def __init__(self, path: Path, urls: Collection[str], max_line_bytes: int) -> None:
        """Reads the whole file once; RequestError names the first invalid line."""
        self.path = path
        self._urls = urls
        self._max_line_bytes = max_line_bytes
        self._offsets = array("q")
        self._fingerprints = array("Q")
        self.models: dict[str, int] = {}  # names of models, and the first line of each
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
        """Marks a request as done; RequestError if the request of that `request_id` was another."""
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
        """Marks the request with this number as done; False if it was, and this answer to it is one too many."""
        if self._is_done[number]:
            return False
        self._is_done[number] = True
        self.num_done += 1
        return True

    def left(self) -> Iterator[Request]:
        """The requests that are not done, in order."""
        for place in self.places_left():
            yield self._read(place)

    def places_left(self) -> Iterator[Place]:
        """Where the requests are that are not done, in order."""
        self._index = None
        for number, is_done in enumerate(self._is_done):
            if not is_done:
                yield self._place(number)

    def _place(self, number: int) -> Place:
        return Place(number, self._offsets[number], self._fingerprints[number])

    def _read(self, place: Place) -> Request:
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
                f"{self.path}, line {self._line_number(second)}: custom_id {custom_id!r:.60} is also that of line "
                f"{self._line_number(first)}, expected unique ids"
            )
        return index

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(line number, offset, line) of every line that is not blank."""
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

    def _note_model(self, request: Request, line_number: int) -> None:
        name = request.body.get("model")
        if isinstance(name, str) and name not in self.models:
            if len(self.models) == MAX_MODELS:
                raise RequestError(f"model is {name!r:.60}, one name more than the {MAX_MODELS} a batch may have")
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
        return files.open_regular(path)  # read twice, which a pipe does not allow
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
