"""Connections to public addresses only: URLs in requests are untrusted."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any

import httpcore2

Resolve = Callable[[str, int], Sequence[str]]  # (host name, port) -> addresses; may block
_MAX_ADDRESSES_TRIED = 4

# IANA's special-purpose registries, without the globally routed entries. Python's is_global differs between versions.
_REFUSED_V4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # shared by the customers of a provider
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local; clouds keep their credentials at 169.254.169.254
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",  # relays of 6to4
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
    """The host has no address, or one that is not public. The message does not say which, unless `allow_private`."""


def is_public(address: str) -> bool:
    """Whether a numeric address is public."""
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
    """The addresses of a host, each once."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class PublicNetwork(httpcore2.AsyncNetworkBackend):
    """Connects to hosts all of whose addresses are public, or to any host if `allow_private`.

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
