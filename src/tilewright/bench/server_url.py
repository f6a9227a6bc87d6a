"""The URL of a server that is measured."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from tilewright.types import RequestError


@dataclass(frozen=True)
class Server:
    """The base URL of a server: http(s)://HOST:PORT, perhaps with a path; a final /v1 is optional."""

    host: str
    port: int
    path: str
    is_tls: bool

    @classmethod
    def parse(cls, url: str) -> Server:
        """The Server of a URL; RequestError if it is invalid."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise RequestError(f"the URL is {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise RequestError(f"the URL is {url!r}, expected such as http://127.0.0.1:8000")
        if parts.username is not None:
            raise RequestError("the URL has a user name in it, expected none: --api-key is for secrets")
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(parts.hostname, port or (443 if is_tls else 80), path, is_tls)

    @property
    def address(self) -> str:
        """host:port, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def authority(self) -> str:
        """The address as a URL has it: without the scheme's default port."""
        return self.address.removesuffix(":443" if self.is_tls else ":80")

    @property
    def url(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.path}"
