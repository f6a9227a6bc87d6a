"""Fetches http(s) URLs of requests."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

import httpcore2

import tilewright
from tilewright.server.media.addresses import PublicNetwork, RefusedAddress, Resolve, resolve_host
from tilewright.types import RequestError

MAX_CONNECTIONS = 64
_KEEPALIVE_S = 5.0
_NUM_RESOLVERS = 16  # threads, so that a slow name server does not delay other lookups
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
# Each piece costs time whatever its size: tiny ones would keep the whole server busy.
_MIN_PIECE_BYTES, _FREE_PIECES = 256, 4096


class FetchError(RequestError):
    """Why a URL was not fetched, without the URL and the item's name."""


@dataclass(frozen=True)
class _Target:
    """A parsed URL."""

    scheme: str
    host: str
    port: int
    path: str  # with the query

    @property
    def headers(self) -> list[tuple[str, str]]:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return [
            ("Host", host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"),
            ("User-Agent", f"tilewright/{tilewright.__version__}"),
            ("Accept", "*/*"),
            ("Accept-Encoding", "identity"),
        ]


class Fetcher:
    """Fetches URLs, many at once; only from public addresses unless `allow_private`."""

    def __init__(
        self,
        *,
        max_redirects: int,
        timeout_s: float,
        allow_private: bool,
        resolve: Resolve = resolve_host,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._max_redirects = max_redirects
        self._timeout_s = timeout_s
        self._resolvers = ThreadPoolExecutor(_NUM_RESOLVERS, "resolve")
        # Proxies of the environment are not used: the addresses they connect to could not be checked.
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=ssl_context or httpcore2.default_ssl_context(),
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_CONNECTIONS // 4,
            keepalive_expiry=_KEEPALIVE_S,
            network_backend=PublicNetwork(resolve, self._resolvers, allow_private=allow_private),
        )

    async def fetch(self, url: str, max_bytes: int, take: Callable[[int], None]) -> bytes:
        """The body of a response with status 200, at most `max_bytes`. `take` reserves memory, and may refuse.

        A FetchError has the reason, and of the response nothing but its status.
        """
        try:
            return await asyncio.wait_for(self._follow(url, max_bytes, take), self._timeout_s)
        except asyncio.TimeoutError:
            raise FetchError(f"not fetched within {self._timeout_s:g} seconds") from None
        except RefusedAddress as error:
            raise FetchError(str(error)) from None
        except httpcore2.ProtocolError:
            raise FetchError("the response is incomplete or not HTTP") from None
        except (httpcore2.NetworkError, httpcore2.TimeoutException, OSError) as error:
            raise FetchError(_why_not(error)) from None

    async def close(self) -> None:
        self._resolvers.shutdown(wait=False, cancel_futures=True)
        await self._pool.aclose()

    async def _follow(self, url: str, max_bytes: int, take: Callable[[int], None]) -> bytes:
        timeouts = {"timeout": {"connect": self._timeout_s / 3}}  # leaves time for a second address
        for _ in range(self._max_redirects + 1):
            target = _parse(url)
            where = httpcore2.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.path)
            async with self._pool.stream("GET", where, headers=target.headers, extensions=timeouts) as response:
                location = _header(response, b"location")
                if response.status == 200:
                    return await _body(response, max_bytes, take)
                if response.status not in _REDIRECTS or not location:
                    raise FetchError(f"the server answered {response.status}")
            url = _join(url, location)
        raise FetchError(f"more than {self._max_redirects} redirects")


def _parse(url: str) -> _Target:
    if any(char <= " " or char in "\\\x7f" for char in url):
        raise FetchError("the URL has a space, a backslash or a control character in it")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host = (host if host.isascii() else host.encode("idna").decode("ascii")).rstrip(".")
        # Percent-encodes what is not encoded yet.
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (parts.query and "?")
        path += quote(parts.query, safe="/%:@!$&'()*+,;=~?")
    except ValueError:
        raise FetchError("it is not a URL") from None
    if parts.scheme not in _PORTS:
        raise FetchError(f"its scheme is {parts.scheme[:20]}:, expected http: or https:")
    if "@" in parts.netloc:
        raise FetchError("the URL names a user, expected none")
    if not host or "%" in host or port == 0:
        raise FetchError("it has no valid host")
    return _Target(parts.scheme, host, port or _PORTS[parts.scheme], path)


def _join(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise FetchError("it redirects to something that is not a URL") from None


def _header(response: httpcore2.Response, name: bytes) -> str:
    """The values of a header, joined."""
    return ", ".join(value.decode("utf-8", "replace") for key, value in response.headers if key.lower() == name)


async def _body(response: httpcore2.Response, max_bytes: int, take: Callable[[int], None]) -> bytes:
    if _header(response, b"content-encoding").strip().lower() not in ("", "identity"):
        raise FetchError("the response is compressed, expected identity")
    length = _header(response, b"content-length")
    if length.isdecimal() and int(length) > max_bytes:
        raise FetchError(f"{int(length)} bytes, the limit is {max_bytes}")
    body, num_pieces = bytearray(), 0
    async for piece in response.aiter_stream():
        num_pieces += 1
        if len(body) + len(piece) > max_bytes:
            raise FetchError(f"more than {max_bytes} bytes, which is the limit")
        if num_pieces > _FREE_PIECES + len(body) // _MIN_PIECE_BYTES:
            raise FetchError(f"it comes in pieces of less than {_MIN_PIECE_BYTES} bytes")
        take(len(piece))
        body += piece
    return bytes(body)


def _why_not(error: Exception) -> str:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            return "its certificate is not trusted"
        if isinstance(seen, ssl.SSLError):
            return "no secure connection could be made"
        seen = seen.__cause__ or seen.__context__
    if isinstance(error, httpcore2.ConnectError | httpcore2.ConnectTimeout):
        return "connecting to its host failed"
    return "the connection broke"
