"""The body of a request as it comes in, within bounds on its size, its number of values and its speed."""

from __future__ import annotations

import asyncio
import contextlib
import time

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from tilewright.server.errors import ApiError
from tilewright.server.memory_budget import MemoryReservation
from tilewright.server.multipart import is_multipart
from tilewright.server.settings import ServerSettings

DISCARD_S = 30.0  # for the rest of a body that is not wanted, as nginx's lingering_time
DISCARD_SILENCE_S = 5.0  # while it comes, as nginx's lingering_timeout
MIN_BYTES_PER_S = 1 << 16
# Commas and opening brackets: JSON has one for each value. An empty list is 3 bytes of a body and 64 of memory.
MAX_BODY_VALUES = 2_000_000


class BodyError(HTTPException):
    """Carries an ApiError through FastAPI, which lets only an HTTPException pass while it reads a body."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.status, error.message, error.headers)
        self.error = error


class BoundedBody:
    """Receives the body of a request while it is neither too long nor too slow and the memory budget has room."""

    def __init__(
        self, receive: Receive, settings: ServerSettings, reservation: MemoryReservation, headers: Headers
    ) -> None:
        self._receive = receive
        self._settings = settings
        # A form is not JSON: the bytes of its files are not counted as values.
        self._is_form = is_multipart(headers.get("content-type", ""))
        self._reservation = reservation
        length = headers.get("content-length", "0")
        self._declared_bytes = int(length) if length.isdecimal() else 0
        # The client may send the body or not if it is answered before it was told to go on.
        self._awaits_continue = headers.get("expect", "").lower() == "100-continue"
        self._size_bytes = 0
        self._num_values = 0
        self.is_complete = not self._declared_bytes and "transfer-encoding" not in headers
        self._began_s = time.monotonic()

    @property
    def can_be_discarded(self) -> bool:
        """Whether the connection can serve another request after an answer that comes before the rest of the body."""
        return not self._awaits_continue and self._declared_bytes <= self._settings.max_body_bytes

    def check_declared(self) -> None:
        """413 if the client says that the body is too long."""
        if self._declared_bytes > self._settings.max_body_bytes:
            raise body_too_long(self._declared_bytes, self._settings.max_body_bytes)

    async def receive(self) -> Message:
        if self.is_complete:
            return await self._receive()
        self._awaits_continue = False
        message = await self._next()
        data = message.get("body", b"")
        self._size_bytes += len(data)
        if not self._is_form:
            self._num_values += sum(map(data.count, (b",", b"[", b"{")))
        self.is_complete = not message.get("more_body", False)
        try:
            self._reservation.add(len(data))
            if self._num_values > MAX_BODY_VALUES:
                what = f"the body has {self._num_values} commas and brackets or more"
                raise _too_large(f"{what}, the limit is {MAX_BODY_VALUES}", "body_has_too_many_values")
            if self._size_bytes > self._settings.max_body_bytes:
                raise body_too_long(self._size_bytes, self._settings.max_body_bytes)
        except ApiError as error:
            raise BodyError(error) from None
        return message

    async def _next(self) -> Message:
        """The next piece; 408 after a silence, or when bytes come too slowly."""
        patience_s = self._settings.body_timeout_s
        left_s = self._began_s + patience_s + self._size_bytes / MIN_BYTES_PER_S - time.monotonic()
        try:
            return await asyncio.wait_for(self._receive(), min(patience_s, left_s))
        except asyncio.TimeoutError:
            message = f"the body is too slow: {self._size_bytes} bytes in {time.monotonic() - self._began_s:.1f} s"
            raise BodyError(ApiError(408, message, code="body_timeout", headers={"Connection": "close"})) from None

    async def discard(self) -> None:
        """Reads and drops the rest, for a bounded time: a client cut off while it sends does not see the answer."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._discard(), DISCARD_S)

    async def _discard(self) -> None:
        silence_s = min(DISCARD_SILENCE_S, self._settings.body_timeout_s)
        while not self.is_complete:
            message = await asyncio.wait_for(self._receive(), silence_s)
            self.is_complete = not message.get("more_body", False)


def body_too_long(size_bytes: int, limit: int) -> ApiError:
    return _too_large(f"the body has {size_bytes} bytes or more, the limit is {limit}", "body_too_large")


def _too_large(message: str, code: str) -> ApiError:
    # The rest of the body may not all be read: the connection cannot be used again.
    return ApiError(413, message, code=code, headers={"Connection": "close"})
