"""How the server behaves; made once, from the flags of `tilewright serve`."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewright.inputs.media import MediaLimits
from tilewright.server.media.gate import MediaPolicy

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]", "::1")
# Smaller than what the library takes from its own user: these come from strangers, and many at once.
MEDIA_LIMITS = MediaLimits(
    max_bytes=64 * 2**20, max_total_bytes=128 * 2**20, max_duration_s=600.0, max_items=32, allow_paths=False
)


@dataclass(frozen=True)
class ServerSettings:
    """Defaults are for a server that one machine's own user, or a proxy in front, talks to."""

    served_name: str | None = None  # instead of the model's own
    api_keys: tuple[str, ...] = ()  # empty: whoever can connect may ask
    cors_origins: tuple[str, ...] = ()  # web pages from elsewhere that may ask
    allowed_hosts: tuple[str, ...] = LOOPBACK_HOSTS  # names the server answers to; empty: any
    max_body_bytes: int = 128 * 2**20
    max_held_bytes: int = 512 * 2**20  # of all bodies under way, and of what was fetched for them
    max_connections: int | None = None  # None: as the limit on open files allows
    max_connections_per_address: int | None = None  # None: half of them
    head_timeout_s: float = 15.0  # from a connection's or a request's first byte to the end of its headers
    body_timeout_s: float = 30.0  # of silence while a body is read
    write_timeout_s: float = 60.0  # while the client reads nothing of what was sent to it
    idle_timeout_s: float = 5.0  # between two requests of a connection
    max_queue: int = 256  # answers that may wait beside those that are computed
    request_timeout_s: float = 1800.0
    media: MediaPolicy = field(default_factory=lambda: MediaPolicy(MEDIA_LIMITS))
    logs_content: bool = False  # bodies go to the log
