"""The settings of the server, from the flags of `tilewright serve`."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewright.inputs.media import MediaLimits
from tilewright.server.media.gate import MediaPolicy

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]", "::1")
# Smaller than the library's defaults: a server's requests are untrusted and concurrent.
MEDIA_LIMITS = MediaLimits(
    max_bytes=64 * 2**20,
    max_total_bytes=128 * 2**20,
    max_duration_s=600.0,
    max_items=32,
    allow_paths=False,
    allow_precomputed=False,
)


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the server. The defaults suit local clients, or a server behind a proxy."""

    served_name: str | None = None  # replaces the model's name
    api_keys: tuple[str, ...] = ()  # empty: no key is needed
    cors_origins: tuple[str, ...] = ()  # origins of web pages, other than the server's own, that may send requests
    allowed_hosts: tuple[str, ...] = LOOPBACK_HOSTS  # names the server answers to, beside loopback's; empty: any
    max_body_bytes: int = 128 * 2**20
    max_held_bytes: int = 512 * 2**20  # limit for bodies and media of all open requests
    max_connections: int | None = None  # None: as many as the limit on open files allows
    max_connections_per_address: int | None = None  # None: half of them
    head_timeout_s: float = 15.0  # from a connection's or a request's first byte to the end of its headers
    body_timeout_s: float = 30.0  # silence while a body is read
    write_timeout_s: float = 60.0  # while the client reads nothing
    idle_timeout_s: float = 5.0  # between two requests of a connection
    max_queue: int = 256  # answers that may wait in the queue
    max_image_queue: int = 16  # requests for images that may wait
    request_timeout_s: float = 1800.0
    media: MediaPolicy = field(default_factory=lambda: MediaPolicy(MEDIA_LIMITS))
    logs_content: bool = False  # log the bodies of requests
