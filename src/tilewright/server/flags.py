"""The flags of `tilewright serve` for clients and media, and the ServerSettings they make."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright import config, engine_flags
from tilewright.host_memory import parse_bytes
from tilewright.types import RequestError

if TYPE_CHECKING:
    from tilewright.server.settings import ServerSettings

DRAIN_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    _add_limits(parser)
    _add_media(parser)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("clients and their limits")
    group.add_argument(
        "--api-key", action="append", metavar="KEY",
        help="a key that clients must send; may be repeated. TILEWRIGHT_API_KEY does the same, and does not show in ps",
    )  # fmt: skip
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="URL",
        help="origin of web pages that may send requests beside the server's own; *: any",
    )
    group.add_argument(
        "--allowed-host", action="append", metavar="NAME",
        help="a host name that requests may use beside localhost, such as that of a proxy in front; *: any "
        "(default: none, or any if --host is not local)",
    )  # fmt: skip
    group.add_argument(
        "--max-connections", type=engine_flags.positive, metavar="N",
        help="open connections of all clients (default: what the limit on open files allows, at most 4096)",
    )  # fmt: skip
    group.add_argument(
        "--max-connections-per-address", type=engine_flags.positive, metavar="N",
        help="open connections from one address (default: half of all)",
    )  # fmt: skip
    group.add_argument(
        "--max-body", default="128MiB", metavar="SIZE", help="size of one request's body (default 128MiB)"
    )
    group.add_argument(
        "--max-queue", type=engine_flags.natural, default=256, metavar="N",
        help="answers that may wait in the queue; more are refused with status 429 (default 256)",
    )  # fmt: skip
    group.add_argument(
        "--max-image-queue", type=engine_flags.natural, default=16, metavar="N",
        help="requests for pictures and videos that may wait; more are refused with status 429 (default 16)",
    )  # fmt: skip
    group.add_argument(
        "--request-timeout", type=_seconds, default=1800.0, metavar="S", help="time for one answer (default 1800)"
    )
    group.add_argument(
        "--drain-timeout", type=_seconds, default=DRAIN_S, metavar="S",
        help="time for answers under way to finish when the server shuts down (default 60)",
    )  # fmt: skip


def _add_media(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pictures, videos and sounds in requests")
    group.add_argument(
        "--allow-files",
        action="append",
        default=[],
        metavar="DIR",
        help="allow file:// URLs of files in DIR; may be repeated",
    )
    group.add_argument("--allow-private-urls", action="store_true", help="also fetch URLs from private addresses")
    group.add_argument(
        "--allow-precomputed", action="store_true",
        help="also take what an encoder reads or makes of a medium (image_features, ...) in its place",
    )  # fmt: skip
    group.add_argument(
        "--media-timeout", type=_seconds, default=30.0, metavar="S", help="time to fetch one URL (default 30)"
    )
    group.add_argument("--max-media-bytes", metavar="SIZE", help="size of one item (default 64MiB)")
    group.add_argument(
        "--max-pixels",
        type=engine_flags.positive,
        metavar="N",
        help="pixels of one picture or frame (default 67108864)",
    )
    group.add_argument(
        "--max-frames", type=engine_flags.positive, metavar="N", help="frames of one video (default 768)"
    )
    group.add_argument("--max-duration", type=_seconds, metavar="S", help="seconds of one video or sound (default 600)")
    group.add_argument("--max-media", type=engine_flags.positive, metavar="N", help="items in one request (default 32)")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds over 0")
    return value


def make_settings(options: argparse.Namespace) -> ServerSettings:
    """ServerSettings from the flags and the environment."""
    from tilewright.server.guard import host_name
    from tilewright.server.media.gate import MediaPolicy
    from tilewright.server.settings import LOOPBACK_HOSTS, MEDIA_LIMITS, ServerSettings

    changes = {
        "max_bytes": None if options.max_media_bytes is None else parse_bytes(options.max_media_bytes),
        "max_pixels": options.max_pixels,
        "max_frames": options.max_frames,
        "max_duration_s": options.max_duration,
        "max_items": options.max_media,
        "allow_precomputed": options.allow_precomputed,
    }
    limits = dataclasses.replace(MEDIA_LIMITS, **{name: value for name, value in changes.items() if value is not None})
    folders = tuple(_folder(name) for name in options.allow_files)
    hosts = tuple(host_name(name) for name in options.allowed_host or ())
    if options.allowed_host is None:
        hosts = LOOPBACK_HOSTS if options.host in LOOPBACK_HOSTS else ()
    api_keys = tuple(options.api_key or config.current().api_keys)
    for key in api_keys:
        if fault := config.api_key_fault(key):
            raise RequestError(f"an API key {fault}")
    return ServerSettings(
        served_name=options.name,
        api_keys=api_keys,
        cors_origins=tuple(_origin(text) for text in options.cors_origin),
        allowed_hosts=() if "*" in hosts else hosts,
        max_connections=options.max_connections,
        max_connections_per_address=options.max_connections_per_address,
        max_body_bytes=parse_bytes(options.max_body),
        max_queue=options.max_queue,
        max_image_queue=options.max_image_queue,
        request_timeout_s=options.request_timeout,
        media=MediaPolicy(
            limits,
            allow_private_addresses=options.allow_private_urls,
            folders=folders,
            timeout_s=options.media_timeout,
        ),
        logs_content=options.log_content,
    )


def _origin(text: str) -> str:
    """The origin of a page as browsers send it: without a path or a final /."""
    if text != "*" and not re.fullmatch(r"(https?|[a-z]+-extension)://[^\s/?#@]+", text):
        raise RequestError(f"--cors-origin is {text!r}, expected *, or such as https://tiles.example:8443")
    return text


def _folder(name: str) -> Path:
    path = Path(name).expanduser().resolve()
    if not path.is_dir():
        raise RequestError(f"--allow-files is {name!r}, which is not a folder")
    return path
