"""Fetches http(s) URLs of requests from public addresses only: URLs in requests are untrusted."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import httpcore2

import tilewright
from tilewright.types import RequestError

Resolve = Callable[[str, int], Sequence[str]]  # (host name, port) -> addresses; may block
_MAX_ADDRESSES_TRIED = 4

# IANA's special-purpose registries without globally routed entries. Python's is_global differs between versions.
_REFUSED_V4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local; clouds keep their credentials at 169.254.169.254
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and the broadcast address
    )
)
# All global addresses are in 2000::/3; the rest is local, mapped from IPv4, multicast or reserved.
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_REFUSED_V6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocols, such as Teredo, whose addresses contain IPv4 ones
        "2001:db8::/32",
        "3fff::/20",
    )
)
# Networks whose addresses contain the IPv4 address that packets are sent to: (network, bits to shift it right).
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96"), 0
_6TO4 = ipaddress.IPv6Network("2002::/16"), 80


class RefusedAddress(Exception):
    """The host has no address, or an address that is not public. The message says which only with `allow_private`."""


def is_public(address: str) -> bool:
    """Return whether a numeric address is public."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv4Address):
        return not any(parsed in network for network in _REFUSED_V4)
    if parsed.scope_id is not None:
        return False
    for network, shift in (_NAT64, _6TO4):
        if parsed in network:
            return is_public(str(ipaddress.IPv4Address(int(parsed) >> shift & 0xFFFFFFFF)))
    return parsed in _GLOBAL_V6 and not any(parsed in network for network in _REFUSED_V6)


def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host, without duplicates."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class PublicNetwork(httpcore2.AsyncNetworkBackend):
    """Connects to hosts whose addresses are all public, or to any host if `allow_private`.

    A host is looked up once per connection, and only the checked addresses are connected to: a name that changes its
    address in between, or a redirect, cannot lead elsewhere.
    """

    def __init__(self, resolve: Resolve, executor: Executor, *, allow_private: bool) -> None:
        self._resolve = resolve
        self._executor = executor
        self._allow_private = allow_private
        self._network = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        failure: Exception = self._refusal()
        for address in (await self._addresses(host, port))[:_MAX_ADDRESSES_TRIED]:
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore2.AsyncNetworkStream:
        raise self._refusal()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _addresses(self, host: str, port: int) -> Sequence[str]:
        try:
            addresses = await asyncio.get_running_loop().run_in_executor(self._executor, self._resolve, host, port)
        except (OSError, ValueError):  # unknown, or not a host name
            raise self._refusal() from None
        if not self._allow_private and not all(is_public(address) for address in addresses):
            raise self._refusal()
        return addresses

    def _refusal(self) -> RefusedAddress:
        if self._allow_private:
            return RefusedAddress("its host is unknown")
        return RefusedAddress("its host has an address that is not public, or none")


MAX_CONNECTIONS = 64
_KEEPALIVE_S = 5.0
_NUM_RESOLVERS = 16  # threads, so that a slow name server does not delay other lookups
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
# Each piece costs time at any size: tiny pieces would keep the whole server busy.
_MIN_PIECE_BYTES, _FREE_PIECES = 256, 4096


class FetchError(RequestError):
    """A URL could not be fetched. The message has the reason, without the URL and the item's name."""


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
    """Fetches URLs concurrently, only from public addresses unless `allow_private`."""

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
        # Proxies from the environment are not used: the addresses they connect to could not be checked.
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=ssl_context or httpcore2.default_ssl_context(),
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_CONNECTIONS // 4,
            keepalive_expiry=_KEEPALIVE_S,
            network_backend=PublicNetwork(resolve, self._resolvers, allow_private=allow_private),
        )

    async def fetch(self, url: str, max_bytes: int, take: Callable[[int], None]) -> bytes:
        """Return the body of a response with status 200, at most `max_bytes`. `take` reserves memory, or raises.

        A FetchError has the reason; it reveals nothing of the response except its status.
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
        raise FetchError("the URL has a space, a backslash or a control character")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host = (host if host.isascii() else host.encode("idna").decode("ascii")).rstrip(".")
        # Percent-encode characters that are not yet encoded.
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
    """Return the values of a header, joined."""
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
